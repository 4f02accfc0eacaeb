"""Undoing an optimizer step: from a copy, bit for bit, or by inverting AdamW in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch

RollbackKind = Literal["snapshot", "inverse"]

_OWN_STATE = ("exp_avg", "exp_avg_sq")
_Place = tuple[int, int, str]
"""(optimizer, parameter or group, name of the value)."""
_Tensors = dict[_Place, torch.Tensor]
_Numbers = dict[_Place, Any]


class Rollback(Protocol):
    """Undoes one step of a rank's torch optimizers."""

    def prepare(self) -> None:
        """Parameters and moments will not change until the next step: copying may begin."""
        ...

    def before_step(self) -> None:
        """The step comes now."""
        ...

    def undo(self) -> None:
        """Parameters, moments and step counts become what they were at `before_step`. Gradients are as in the step."""
        ...


def make_rollback(kind: RollbackKind, optimizers: Sequence[Any], *, on_host: bool = False) -> Rollback:
    """The rollback for these torch optimizers.

    Args:
        optimizers: torch's, apex's or Transformer Engine's Adam; what they step is what is undone: the fp32
            parameters of the shard that this rank owns.
        on_host: keep the copy in pinned host memory.

    Raises:
        ValueError: `inverse` for an optimizer that is not AdamW.
    """
    if kind == "snapshot":
        return Snapshot(optimizers, on_host=on_host)
    if on_host:
        raise ValueError("the inverse keeps no copy that could be on the host")
    return Inverse(optimizers)


def _parameters(optimizer: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Every parameter, and the group it is in."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


class Snapshot:
    """A copy of parameters, moments and step counts, in buffers that are made once.

    Memory: 12 bytes a parameter of this rank's shard (fp32 parameter and two moments). On a GPU the copy runs on a
    stream of its own from the moment the last step was validated, beside the iteration's computing.
    """

    def __init__(self, optimizers: Sequence[Any], *, on_host: bool = False) -> None:
        self._optimizers = optimizers
        self._on_host = on_host and torch.cuda.is_available()
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._buffers: _Tensors = {}
        self._numbers: _Numbers = {}
        self._is_prepared = False

    def prepare(self) -> None:
        if self._stream is None:
            return  # a CPU has no copy engine: copying beside computing would only slow that down
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy()
        self._is_prepared = True

    def before_step(self) -> None:
        if self._is_prepared and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            self._copy()
        self._is_prepared = False

    @torch.no_grad()
    def _copy(self) -> None:
        tensors, self._numbers = self._values()
        for key, tensor in tensors.items():
            if key not in self._buffers:
                device = torch.device("cpu") if self._on_host else tensor.device
                self._buffers[key] = torch.empty_like(tensor, device=device, pin_memory=self._on_host)
            self._buffers[key].copy_(tensor, non_blocking=True)
        for key in self._buffers.keys() - tensors.keys():
            del self._buffers[key]

    @torch.no_grad()
    def undo(self) -> None:
        tensors, numbers = self._values()
        for key, tensor in tensors.items():
            if key in self._buffers:
                tensor.copy_(self._buffers[key], non_blocking=True)
        for o, optimizer in enumerate(self._optimizers):
            for g, group in enumerate(optimizer.param_groups):
                self._undo_numbers(group, (o, g), numbers)
            for p, (_, parameter) in enumerate(_parameters(optimizer)):
                if any((o, p, name) not in self._buffers for name in _OWN_STATE):
                    optimizer.state.pop(parameter, None)  # the step was its first one

    def _undo_numbers(self, group: dict[str, Any], place: tuple[int, int], now: _Numbers) -> None:
        """apex and Transformer Engine count steps in the parameter group, as a number."""
        key = (*place, "step")
        if key in self._numbers:
            group["step"] = self._numbers[key]
        elif key in now:
            del group["step"]

    def _values(self) -> tuple[_Tensors, _Numbers]:
        """By place: the tensors that a step changes in place, and the numbers that it replaces."""
        tensors: _Tensors = {}
        numbers: _Numbers = {}
        for o, optimizer in enumerate(self._optimizers):
            for p, (_, parameter) in enumerate(_parameters(optimizer)):
                tensors[o, p, "parameter"] = parameter.data
                for name, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        tensors[o, p, name] = value
            for g, group in enumerate(optimizer.param_groups):
                step = group.get("step")
                if isinstance(step, torch.Tensor):
                    tensors[o, -1 - g, "step"] = step
                elif step is not None:
                    numbers[o, g, "step"] = step
        return tensors, numbers


class Inverse:
    """Solves AdamW's equations for what was before the step. Takes no memory.

    With c1 = 1 - beta1^t and c2 = 1 - beta2^t (the paper's appendix on rolling back AdamW, tuzTN0eIO5):

        theta <- (theta + lr (m / c1) / (sqrt(v / c2) + eps)) / (1 - lr weight_decay)
        m <- (m - (1 - beta1) g) / beta1,   v <- (v - (1 - beta2) g^2) / beta2,   t <- t - 1

    Not exact: every value is off by some rounding errors of the larger values in its equation. v, which may
    come out slightly negative, is cut off at 0.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(getattr(optimizer, "adam_w_mode", False))
            if not decoupled or any(group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups):
                raise ValueError(f"only AdamW can be inverted, and the optimizer is {type(optimizer).__name__}")
        self._optimizers = optimizers

    def prepare(self) -> None:
        return

    def before_step(self) -> None:
        return

    @torch.no_grad()
    def undo(self) -> None:
        for optimizer in self._optimizers:
            for group, parameter in _parameters(optimizer):
                if parameter.grad is None:
                    continue
                state = optimizer.state[parameter]
                step = int(group["step"] if "step" in group else state["step"])
                _invert(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], step, group)
                if "step" in state:
                    state["step"] -= 1
            for group in optimizer.param_groups:
                if "step" in group:
                    group["step"] -= 1


def _invert(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    group: dict[str, Any],
) -> None:
    """Undo the step number `step` of one parameter; `gradient` is that of the step."""
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    denominator = exp_avg_sq.div(c2).sqrt_().add_(group["eps"])
    parameter.addcdiv_(exp_avg, denominator, value=lr / c1)
    parameter.div_(1 - lr * group["weight_decay"])
    if step == 1:
        exp_avg.zero_()
        exp_avg_sq.zero_()
        return
    exp_avg.sub_(gradient, alpha=1 - beta1).div_(beta1)
    exp_avg_sq.addcmul_(gradient, gradient, value=beta2 - 1).div_(beta2).clamp_(min=0)
