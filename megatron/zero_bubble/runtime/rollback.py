"""Undoes an optimizer step, either exactly from copied values or approximately by inverting AdamW in place."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch

RollbackKind = Literal["snapshot", "inverse"]


class Rollback(Protocol):
    """Undoes one step of a rank's torch optimizers."""

    def prepare(self) -> None:
        """Begin to copy the parameters and optimizer states, which do not change before the next step."""
        return

    def before_step(self) -> None:
        """Complete the copy of the parameters and optimizer states, right before the optimizer's step."""
        return

    def undo(self) -> None:
        """Restore the values that parameters, optimizer states and settings of parameter groups had at `before_step`.

        The gradients of the undone step must still be in memory.
        """


def make_rollback(kind: RollbackKind, optimizers: Sequence[Any], *, on_host: bool = False) -> Rollback:
    """Make a rollback of the given kind for `optimizers`.

    Args:
        optimizers: optimizers of torch, apex or Transformer Engine, whose fp32 parameters the rollback restores.
        on_host: whether the copies of parameters and optimizer states are in pinned host memory.

    Raises:
        ValueError: `kind` is `inverse`, and either `on_host` is True, or an optimizer is not AdamW, or an optimizer
            uses `amsgrad` or `maximize`.
    """
    if kind == "snapshot":
        return Snapshot(optimizers, on_host=on_host)
    if on_host:
        raise ValueError("on_host needs a snapshot: the inverse keeps no copy")
    return Inverse(optimizers)


class _Tensor(NamedTuple):
    """A tensor that an optimizer step may change or replace, and a copy of the tensor from before the step."""

    tensor: torch.Tensor
    contents: torch.Tensor

    def restore(self) -> torch.Tensor:
        self.tensor.copy_(self.contents, non_blocking=True)
        return self.tensor


_Values = dict[str, Any]
"""Name of a state or setting -> its saved value: a `_Tensor` for a tensor, and a copy for any other value."""


class Snapshot:
    """Undoes a step by restoring copies of parameters, optimizer states, and settings of the parameter groups.

    A `Snapshot` copies all optimizer states, such as moments and step counts, and the numbers, strings and tensors that
    are attributes of an optimizer itself. Before the first optimizer step, there are no optimizer states to copy. The
    copies take as much memory as the parameters and the optimizer states: with Adam, 12 bytes for each parameter that
    this rank's optimizers update. The memory for the copies is allocated once. On a GPU, a separate stream copies the
    values while the GPU computes the gradients for the next optimizer step.
    """

    def __init__(self, optimizers: Sequence[Any], *, on_host: bool = False) -> None:
        self._optimizers = optimizers
        self._on_host = on_host and torch.cuda.is_available()
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._parameters: list[tuple[torch.Tensor, _Tensor]] = []
        """Pairs of a parameter and its data."""
        self._states: list[dict[Hashable, _Values]] = []
        """For each optimizer, a dictionary: key of the optimizer's state -> the copied values of this state."""
        self._settings: list[list[_Values]] = []
        """For each optimizer, the settings of its parameter groups at the call of `before_step`."""
        self._attributes: list[_Values] = []
        """For each optimizer, its own attributes at the call of `before_step`, such as a count of steps."""
        self._is_prepared = False

    def prepare(self) -> None:
        if self._stream is None:
            return  # a CPU has no copy engine: an early copy would slow down the computation that runs meanwhile
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy_states()
        self._is_prepared = True

    def before_step(self) -> None:
        if self._is_prepared and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            self._copy_states()
        self._is_prepared = False
        self._settings = [
            [self._copies((o, g), group, leave_out=("params",)) for g, group in enumerate(optimizer.param_groups)]
            for o, optimizer in enumerate(self._optimizers)
        ]
        self._attributes = [self._copies(o, _attributes(optimizer)) for o, optimizer in enumerate(self._optimizers)]

    @torch.no_grad()
    def _copy_states(self) -> None:
        self._parameters, self._states = [], []
        for o, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                self._parameters += [(each, self._copy((o, each), each.data)) for each in group["params"]]
            self._states.append({key: self._copies((o, key), state) for key, state in optimizer.state.items()})

    def _copies(self, place: Hashable, values: Mapping[str, Any], leave_out: Collection[str] = ()) -> _Values:
        return {
            name: self._copy((place, name), value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for name, value in values.items()
            if name not in leave_out
        }

    def _copy(self, place: Hashable, tensor: torch.Tensor) -> _Tensor:
        if place not in self._buffers:
            device = torch.device("cpu") if self._on_host else tensor.device
            self._buffers[place] = torch.empty_like(tensor, device=device, pin_memory=self._on_host)
        return _Tensor(tensor, self._buffers[place].copy_(tensor, non_blocking=True))

    @torch.no_grad()
    def undo(self) -> None:
        for parameter, data in self._parameters:
            if parameter.data_ptr() != data.tensor.data_ptr():
                parameter.data = data.tensor  # the step has replaced the data
            data.restore()
        for optimizer, attributes in zip(self._optimizers, self._attributes, strict=True):
            vars(optimizer).update({name: _restored(value) for name, value in attributes.items()})
        for optimizer, states, settings in zip(self._optimizers, self._states, self._settings, strict=True):
            for key in [key for key in optimizer.state if key not in states]:
                del optimizer.state[key]  # the undone step created this state
            for key, values in states.items():
                _restore(optimizer.state[key], values)
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                _restore(group, {"params": group["params"], **values})


def _restore(now: dict[str, Any], before: _Values) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        now[name] = _restored(value)


def _restored(value: Any) -> Any:
    return value.restore() if isinstance(value, _Tensor) else value


def _attributes(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's own numbers, strings and tensors, which its step may change."""
    kinds = (bool, int, float, complex, str, torch.Tensor, type(None))
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, kinds)}


class Inverse(Rollback):
    """Undoes a step of AdamW without extra memory, by solving AdamW's equations for the values before the step.

    `Inverse` computes the values that the parameter theta, the moments m and v, and the step count t had before the
    step. The equations use the values after the step and the gradient g, with c1 = 1 - beta1^t and c2 = 1 - beta2^t.
    The equations are in the appendix of Qi et al. 2024 on rolling back AdamW
    (https://openreview.net/forum?id=tuzTN0eIO5):

        theta <- (theta + lr (m / c1) / (sqrt(v / c2) + eps)) / (1 - lr weight_decay)
        m <- (m - (1 - beta1) g) / beta1,   v <- (v - (1 - beta2) g^2) / beta2,   t <- t - 1

    The inversion is not exact: the error of a value is a few rounding errors of the largest value in the equation. If
    rounding makes the computed v negative, `Inverse` sets v to 0.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(getattr(optimizer, "adam_w_mode", False))
            if not decoupled or any(group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups):
                raise ValueError(f"only AdamW can be inverted, and the optimizer is {type(optimizer).__name__}")
        self._optimizers = optimizers

    @torch.no_grad()
    def undo(self) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        _invert(parameter, optimizer.state[parameter], group)
                if "step" in group:
                    group["step"] -= 1


def _invert(parameter: torch.nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Undo the last step of one parameter in place, from the parameter's gradient and optimizer state."""
    gradient, exp_avg, exp_avg_sq = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
    step = int(group["step"] if "step" in group else state["step"])
    if "step" in state:
        state["step"] -= 1
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


def settings_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, with copies of tensors, which a scheduler may change in place."""
    return [{name: _clone_of_tensor(value) for name, value in group.items() if name != "params"} for group in groups]


def _clone_of_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _differ(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(value, other)
    return value is not other and bool(value != other)


@contextmanager
def with_settings(groups: Sequence[dict[str, Any]], settings: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Inside the `with` block, replace the settings of parameter groups by the `settings` of an earlier step.

    A setting whose value equals the value in the earlier step is neither replaced nor restored, so that a change of
    the setting by the optimizer inside the `with` block is kept.
    """
    replaced = []
    for group, earlier in zip(groups, settings, strict=True):
        for name, value in earlier.items():
            if _differ(group[name], value):
                replaced.append((group, name, group[name], _clone_of_tensor(group[name])))
                group[name] = value
    try:
        yield
    finally:
        for group, name, value, contents in replaced:
            # Undoing the step in the block may have changed this tensor.
            group[name] = value.copy_(contents) if isinstance(value, torch.Tensor) else value
