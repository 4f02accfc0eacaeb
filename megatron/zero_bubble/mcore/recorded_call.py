"""Runs a script's forward step with a recorder in place of the model, so that the model can be called later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

ForwardStep = Callable[[Any, Any], tuple[Any, Any]]
"""A forward step as megatron-core calls it: (data iterator, model) -> (output, loss function)."""


class ForwardStepError(ValueError):
    """Raised for a forward step that schedules or vocabulary shards do not support; the message has the reason."""


class RecordedCall(NamedTuple):
    """The call of the model in a forward step, and the loss function that the forward step has returned."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    loss_function: Callable[..., Any] | None

    @property
    def tokens(self) -> torch.Tensor | None:
        """The tokens that the model is to embed, [batch, sequence]; None if the forward step gives no tokens."""
        return self.arguments[0] if self.arguments else self.keywords.get("input_ids")

    def forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Any]:
        """Call the model with the recorded arguments; has the signature and the result of the script's forward step."""
        return model(*self.arguments, **self.keywords), self.loss_function


def record_call(
    forward_step: ForwardStep, data_iterator: Iterator[Any] | None, model: torch.nn.Module, needed_by: str
) -> RecordedCall:
    """Run a forward step with a recorder in place of the model, and return the recorded call of the model.

    Args:
        needed_by: the flag that needs the recorded call, for an error message.

    Raises:
        ForwardStepError: the forward step does not call the model exactly once, or changes the model's output.
    """
    needed = f"{needed_by} needs a forward step that calls the model once and returns its output unchanged"
    recorder = _Recorder(model)
    try:
        output, loss_function = forward_step(data_iterator, recorder)
    except (AttributeError, TypeError) as error:
        if ModelOutput.__name__ not in str(error):
            raise
        raise ForwardStepError(f"{needed}, but it computes with it: {error}") from error
    calls = object.__getattribute__(recorder, "calls")
    if len(calls) != 1 or output is not calls[0][0]:
        raise ForwardStepError(
            f"{needed}, but this forward step called the model {len(calls)} times and returned {type(output).__name__}"
        )
    _, arguments, keywords = calls[0]
    return RecordedCall(arguments, keywords, loss_function)


class ModelOutput:
    """Placeholder for the output of a model that has not run."""


class _Recorder:
    """Replaces a model: has the model's attributes and class, and records calls without running the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "calls", [])

    def __call__(self, *arguments: Any, **keywords: Any) -> ModelOutput:
        output = ModelOutput()
        object.__getattribute__(self, "calls").append((output, arguments, keywords))
        return output

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "model"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "model"), name, value)
