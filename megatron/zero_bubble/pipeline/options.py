"""The options of a `Pipeline`, and checks of the arguments of `Pipeline`."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from megatron.zero_bubble.pipeline.interconnect import Agreement
from megatron.zero_bubble.pipeline.specs import class_name_of, refuse_unusable, tie_of, words_of
from megatron.zero_bubble.schedule import Schedule
from megatron.zero_bubble.schedule.formats import schedule_to_json

Partition = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of a `Pipeline`; all options except `example` must be the same on all ranks.

    Args:
        partition: how layers are assigned to stages. "uniform" balances the number of layers of each stage.
            "parameters" balances the number of parameters of each stage. "type:REGEX" balances the number of layers
            whose class name matches the regular expression REGEX. "profile" balances the measured times of the layers.
            If `partition` is a list, the list contains the index of the first layer of every stage except stage 0.
        example: a pair (inputs, targets) of one microbatch, with which `partition="profile"` measures the layers.
        num_chunks: number of stages per rank; by default, the named schedule determines the number.
        memory_limit: limit for the activation memory of each rank, as one number for all ranks or as a list with one
            number per rank. The unit of `memory_limit` is the memory of one microbatch's activations on all stages of a
            rank. By default, the named schedule determines the memory limit.
        offload: bandwidth of the link between a rank's device and its host, in each direction. The bandwidth is given
            as the number of microbatches whose activations the link copies in the time of one forward. If `offload` is
            a number, a planned schedule copies activations to the host and back where the copies make the schedule
            faster under `memory_limit`. With `offload`, microbatches keep the order of the data. If `offload` is None,
            no activations are copied to the host.
        checkpoint: whether all layers drop their activations in F and repeat their forward in R. The argument
            `checkpoint` of a `LayerSpec` selects recomputation for a single layer.
        split_layers: classes of layers, in addition to `weight_split.SPLIT_LAYERS`, whose backward is split into B and
            W (see `weight_split.split_modules`).
        variable_shapes: whether layers can return different shapes for two microbatches with equal input shapes, as a
            layer that drops padding does. Microbatches with different input shapes do not need `variable_shapes`.
        microbatch_order: "planned" runs microbatches of different shapes in the order with the least predicted time;
            "data" keeps the order of the data. The predictions use operation times that are measured in the first steps
            whose microbatches differ in shape.
        post_validation: whether `train_step` takes the optimizer's step before the norm of all gradients is known.

    Raises:
        ValueError: an option has a wrong type; `microbatch_order` is unknown; `variable_shapes` and `post_validation`
            are both set; `offload` is not a finite number above zero; or `offload` is set without `memory_limit` or
            together with `checkpoint`.
    """

    partition: Partition = "parameters"
    example: tuple[Any, Any] | None = None
    num_chunks: int | None = None
    memory_limit: float | Sequence[float] | None = None
    offload: float | None = None
    checkpoint: bool = False
    split_layers: Sequence[type[nn.Module]] = ()
    variable_shapes: bool = False
    microbatch_order: str = "planned"
    post_validation: bool = False

    def __post_init__(self) -> None:
        for name, (fits, words) in _TYPES.items():
            if not fits(value := getattr(self, name)):
                raise ValueError(f"{name}={_short(value)} is not {words}")
        if self.variable_shapes and self.post_validation:
            raise ValueError("variable_shapes=True and post_validation=True do not go together")
        if self.microbatch_order not in ("planned", "data"):
            raise ValueError(f"microbatch_order={self.microbatch_order!r} is neither 'planned' nor 'data'")
        if self.offload is None:
            return
        if not 0 < self.offload < math.inf:
            raise ValueError(f"offload={self.offload!r} must be above zero: microbatches copied during one forward")
        if self.memory_limit is None:
            raise ValueError("offload needs memory_limit: without a limit nothing has to leave the device")
        if self.checkpoint:
            raise ValueError("offload and checkpoint=True: nothing that is recomputed is copied, so leave one out")

    def compared(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks: all options but `example`, which only one rank uses."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "example"}


def _short(value: Any) -> str:
    return " ".join(f"{value!r:.200}".split())


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _each_in_order(value: Any, fits: Callable[[Any], bool]) -> bool:
    is_collection = isinstance(value, Collection) and not isinstance(value, str | torch.Tensor | Set)
    return is_collection and all(map(fits, value))


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "partition": (lambda v: isinstance(v, str) or _each_in_order(v, _is_whole), "a name or a list of whole numbers"),
    "example": (lambda v: v is None or (isinstance(v, tuple | list) and len(v) == 2), "a pair (inputs, targets)"),
    "num_chunks": (lambda v: v is None or _is_whole(v), "a whole number"),
    "memory_limit": (
        lambda v: v is None or _is_number(v) or _each_in_order(v, _is_number),
        "a number, or a number per rank",
    ),
    "offload": (lambda v: v is None or _is_number(v), "a number"),
    "split_layers": (lambda v: _each_in_order(v, _is_class), "a list of classes of modules"),
    **dict.fromkeys(
        ("checkpoint", "variable_shapes", "post_validation"), (lambda v: isinstance(v, bool), "True or False")
    ),
}
"""Option -> (function that tells whether a value has the type of the option, description of the type)."""


def check_types(layers: Any, loss_fn: Any, options: Any) -> None:
    """Check the types of the arguments `layers`, `loss_fn` and `options` of a `Pipeline`.

    Raises:
        ValueError: an argument has a wrong type.
    """
    if not isinstance(layers, Iterable):
        given = f"a {type(layers).__name__}" if isinstance(layers, nn.Module) else _short(layers)
        raise ValueError(
            f"layers must be a list of layers, each of which takes the previous layer's output, got {given}"
        )
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function of output and target, got {_short(loss_fn)}")
    if not isinstance(options, PipelineOptions):
        raise ValueError(f"options must be PipelineOptions(...), got {_short(options)}")


def check_step(optimizer: torch.optim.Optimizer, max_norm: float, *, post_validation: bool) -> None:
    """Check the arguments of `train_step`.

    Post-validation also needs the optimizer's `param_groups`.

    Raises:
        ValueError: `optimizer` is no optimizer, or its step needs a closure, as in `torch.optim.LBFGS`; or `max_norm`
            is not a number.
    """
    needed = ("step", "zero_grad", *(("param_groups",) if post_validation else ()))
    if not all(hasattr(optimizer, name) for name in needed):
        raise ValueError(f"optimizer={_short(optimizer)} is not an optimizer")
    if not (_is_number(max_norm) or (isinstance(max_norm, torch.Tensor) and max_norm.numel() == 1)):
        raise ValueError(f"max_norm={_short(max_norm)} is not a number: leave it out for steps without clipping")
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    try:
        # A scheduler has wrapped the optimizer's own `step`.
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        raise ValueError(
            f"train_step cannot use {type(optimizer).__name__}, whose step needs a closure: choose an optimizer whose "
            "step() needs no arguments"
        ) from None


def refuse_line_search() -> None:
    """Raise `ValueError` inside a closure of `torch.optim.LBFGS`, which searches along its rank's parameters only.

    The searches of two ranks may end after different numbers of calls of the closure, so that ranks would wait for each
    other. A closure that an optimizer calls once is no problem.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == torch.optim.LBFGS.__module__:
            raise ValueError(
                "a pipeline cannot train inside the step of LBFGS, which would search along the parameters of each "
                "rank: choose an optimizer whose step() needs no closure"
            )
        frame = frame.f_back


Words = dict[str, str | list[str]]
"""Name of an argument of `Pipeline` -> text that describes the value; for `layers`, a list with one text per layer."""


def check_same_arguments(agreement: Agreement, layers: Sequence[Any], others: Mapping[str, Any]) -> None:
    """Check that the arguments of `Pipeline` are valid, and the same on all ranks; a collective call.

    Raises:
        ValueError: on every rank, if an argument differs between two ranks, `num_microbatches` is no whole number above
            zero, `schedule` is neither a name nor a `Schedule`, or `refuse_unusable` refuses a layer.
    """
    first, *following = agreement.collect(lambda: _argument_texts(layers, others))
    for rank, words in enumerate(following, start=1):
        for name, value in words.items():
            if value != first[name]:
                raise ValueError(
                    f"all ranks of a pipeline need the same {name}: {_difference(first[name], value, rank)}"
                )


def _argument_texts(layers: Sequence[Any], others: Mapping[str, Any]) -> Words:
    count = others["num_microbatches"]
    if type(count) is not int or count < 1:
        raise ValueError(f"num_microbatches must be a whole number of at least 1, got {count!r}")
    if not isinstance(others["schedule"], str | Schedule):
        raise ValueError(f"schedule must be a name or a Schedule, got {others['schedule']!r}")
    for index, layer in enumerate(layers):
        refuse_unusable(index, layer)
    words = {
        name: _schedule_words(value) if isinstance(value, Schedule) else repr(value) for name, value in others.items()
    }
    texts = [_layer_words(layer) for layer in layers]
    return {**words, "layers": texts}


def _layer_words(layer: Any) -> str:
    if isinstance(layer, nn.Module):
        return words_of(layer)
    tie = f" tied as {tie_of(layer)!r}" if tie_of(layer) is not None else ""
    return f"{class_name_of(layer)}{tie}{' with checkpoint=True' if getattr(layer, 'checkpoint', False) else ''}"


def _schedule_words(schedule: Schedule) -> str:
    digest = hashlib.sha256(schedule_to_json(schedule).encode()).hexdigest()
    return f"{schedule.name} ({schedule.num_microbatches} microbatches, digest {digest[:8]})"


def _difference(first: str | list[str], other: str | list[str], rank: int) -> str:
    if isinstance(first, str):
        return f"rank 0 has {first}, rank {rank} has {other}"
    if len(first) != len(other):
        return f"rank 0 has {len(first)}, rank {rank} has {len(other)}"
    index = next(index for index, (mine, two) in enumerate(zip(first, other, strict=True)) if mine != two)
    return f"layer {index} is {first[index]} on rank 0 and {other[index]} on rank {rank}"
