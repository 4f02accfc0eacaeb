"""Zero-bubble pipeline parallelism for Megatron, as a layer on the unmodified megatron-core.

`enable` and `disable` put it into a training script of Megatron-LM's, as `python -m megatron.zero_bubble` does.
"""

from typing import Any

__all__ = ["disable", "enable"]


def __getattr__(name: str) -> Any:
    """The launcher is imported when it is asked for: `megatron.zero_bubble.schedule` needs no torch."""
    if name in __all__:
        from megatron.zero_bubble.launcher import launch

        return getattr(launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
