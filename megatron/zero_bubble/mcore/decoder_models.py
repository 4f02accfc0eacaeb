"""The classes of megatron-core's models that consist of an embedding, a stack of layers and an output layer."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from megatron.core.models.gpt import GPTModel

HYBRID_RECOMPUTES = find_spec("megatron.core.models.hybrid") is not None
"""Whether hybrid models support recomputation, as they do from megatron-core 0.18 on."""
_STACK, _ALLOCATION, _MODEL = (
    ("models.hybrid.hybrid_block", "models.hybrid.hybrid_layer_allocation", "models.hybrid.hybrid_model")
    if HYBRID_RECOMPUTES
    else ("ssm.mamba_block", "ssm.mamba_hybrid_layer_allocation", "models.mamba.mamba_model")
)
STACK_MODULE = f"megatron.core.{_STACK}"
"""The module of megatron-core that defines a hybrid model's stack of layers."""
ALLOCATION_MODULE = f"megatron.core.{_ALLOCATION}"
"""The module of megatron-core that reads the layer patterns of hybrid models."""
_HYBRID_NAME = "HybridModel" if HYBRID_RECOMPUTES else "MambaModel"
HYBRID: Any = getattr(importlib.import_module(f"megatron.core.{_MODEL}"), _HYBRID_NAME)
"""The class of hybrid models, whose layers a pattern describes; its name is `MambaModel` before megatron-core 0.18."""
HYBRID_TAKES_STAGES = hasattr(importlib.import_module(ALLOCATION_MODULE), "select_pipeline_segment")
"""Whether hybrid models accept layer patterns in which `|` separates stages, as they do from megatron-core 0.17 on."""

DECODER_MODELS: tuple[Any, ...] = (GPTModel, HYBRID)
"""Model classes with the modules `embedding`, `decoder.layers` and `output_layer`; a stage has the modules it needs."""
DECODER_NAMES = " or ".join(kind.__name__ for kind in DECODER_MODELS)
"""The names of `DECODER_MODELS`, as error messages list them."""


def require_decoder_models(models: Iterable[Any], flag: str) -> None:
    """Raise `ValueError` if a model is of another class than `DECODER_MODELS`, which `flag` needs."""
    kinds = {type(model).__name__ for model in models if not isinstance(model, DECODER_MODELS)}
    if kinds:
        raise ValueError(f"{flag} needs megatron-core's {DECODER_NAMES}, got {', '.join(sorted(kinds))}: leave it out")
