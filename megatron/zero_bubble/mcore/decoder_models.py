"""The classes of megatron-core's models that consist of an embedding, a stack of layers and an output layer."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from megatron.core.models.gpt import GPTModel

HYBRID_RECOMPUTES = find_spec("megatron.core.models.hybrid") is not None
"""Whether hybrid models, whose layers a pattern describes, support recomputation; True from megatron-core 0.18 on."""
STACK_MODULE = "megatron.core.models.hybrid.hybrid_block" if HYBRID_RECOMPUTES else "megatron.core.ssm.mamba_block"
"""The module of megatron-core that defines a hybrid model's stack of layers."""
ALLOCATION_MODULE = (
    "megatron.core.models.hybrid.hybrid_layer_allocation"
    if HYBRID_RECOMPUTES
    else "megatron.core.ssm.mamba_hybrid_layer_allocation"
)
"""The module of megatron-core that reads the layer patterns of hybrid models."""


HYBRID: Any = (
    importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel
    if HYBRID_RECOMPUTES
    else importlib.import_module("megatron.core.models.mamba.mamba_model").MambaModel
)
"""The class of hybrid models, whose layers a pattern describes; its name is `MambaModel` before megatron-core 0.18."""
HYBRID_TAKES_STAGES = hasattr(importlib.import_module(ALLOCATION_MODULE), "select_pipeline_segment")
"""Whether hybrid models choose a stage's layers from a pattern with `|`, as they do from megatron-core 0.17 on."""

DECODER_MODELS: tuple[Any, ...] = (GPTModel, HYBRID)
"""Model classes with the modules `embedding`, `decoder.layers` and `output_layer`, on the stages that need them."""
