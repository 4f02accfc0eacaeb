"""Zero-bubble pipeline parallelism for Megatron, as a layer on the unmodified megatron-core.

- `enable` adds zero bubble to a training script of Megatron-LM, as `python -m megatron.zero_bubble` does, and
  `disable` removes zero bubble again.
- `Pipeline`, `PipelineOptions`, `LayerSpec` and `TiedLayerSpec` split plain PyTorch layers over ranks, without
  Megatron.
- `get_forward_backward_func`, `split_weight_gradients` and `WeightGradStore` add zero bubble to a training loop of
  your own. `shard_vocabulary` spreads the vocabulary over all ranks. `LookAhead` plans each step from the lengths of
  the step's microbatches.
- `megatron.zero_bubble.planner` plans schedules, and `megatron.zero_bubble.schedule` simulates, validates and draws
  schedules; neither package needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.zero_bubble.launcher.launch import disable, enable
    from megatron.zero_bubble.mcore.linear import split_weight_gradients
    from megatron.zero_bubble.mcore.vocabulary_model import shard_vocabulary
    from megatron.zero_bubble.pipeline.options import PipelineOptions
    from megatron.zero_bubble.pipeline.pipeline import Pipeline
    from megatron.zero_bubble.pipeline.specs import LayerSpec, TiedLayerSpec
    from megatron.zero_bubble.runtime.look_ahead import LookAhead
    from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
    from megatron.zero_bubble.schedules import get_forward_backward_func

__all__ = [
    "LayerSpec",
    "LookAhead",
    "Pipeline",
    "PipelineOptions",
    "TiedLayerSpec",
    "WeightGradStore",
    "disable",
    "enable",
    "get_forward_backward_func",
    "shard_vocabulary",
    "split_weight_gradients",
]

_MODULES = {
    "LayerSpec": "pipeline.specs",
    "LookAhead": "runtime.look_ahead",
    "Pipeline": "pipeline.pipeline",
    "PipelineOptions": "pipeline.options",
    "TiedLayerSpec": "pipeline.specs",
    "WeightGradStore": "runtime.weight_grad_store",
    "disable": "launcher.launch",
    "enable": "launcher.launch",
    "get_forward_backward_func": "schedules",
    "shard_vocabulary": "mcore.vocabulary_model",
    "split_weight_gradients": "mcore.linear",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: importing this package imports neither torch nor megatron-core."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
