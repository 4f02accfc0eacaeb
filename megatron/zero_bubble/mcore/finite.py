"""Ends the training when a loss, gradient or weight is not finite, and names the first non-finite value.

megatron-core's own check of gradients waits for the device twice for each gradient bucket. In a training step,
`FiniteCheck` reads only the norm of all gradients from the device as long as this norm is finite. The optimizer
computes the norm of all gradients before its step, and the norm is finite only if every gradient is finite. If the norm
is not finite, all ranks that share the norm notice in the same step, and together look for the first non-finite value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import to_local_if_dtensor, unwrap_model

from megatron.zero_bubble.mcore.buckets import bucket_groups
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.schedule import Placement

SWITCH_OFF = "--no-check-for-nan-in-loss-and-grad"
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+(?=\.)")


def spoil_if_infinite(loss: torch.Tensor) -> torch.Tensor:
    """Leave a finite `loss` and its gradient bitwise unchanged, and make the gradient of a non-finite `loss` NaN.

    The gradient of an infinite loss may be finite. A NaN gradient makes the norm of all gradients NaN on all ranks that
    share the norm.
    """
    return loss * (1 + 0 * loss.detach())


@dataclass(frozen=True, order=True)
class _Finding:
    """A value that is not finite.

    Findings are ordered by kind and position. The smallest of several findings is probably the cause of the other
    findings.
    """

    kind: int
    """Kind of the value: 0 for a weight, 1 for a loss, 2 for a gradient."""
    position: tuple[int, int]
    """Sort key among the values of one kind: a value that is computed or used earlier has a smaller key."""
    rank: int
    description: str


@dataclass(eq=False)
class FiniteCheck:
    """Checks losses, gradients and weights; if a value is not finite, all ranks that check together raise an error.

    Args:
        chunks: this rank's model chunks, wrapped in DDP.
        placement: maps this rank's chunks to stages.
        error: the type of the raised error; the error's message has one line.
        iteration: function that returns the number of the present iteration.
    """

    chunks: Sequence[Any]
    placement: Placement
    error: type[ValueError]
    iteration: Callable[[], int]
    losses: Iterable[torch.Tensor] = ()
    """The losses of this iteration's microbatches on this rank."""
    steps_with: dist.ProcessGroup | None = None
    """The ranks that share a gradient norm and together look for the non-finite value; None for all ranks."""

    def __post_init__(self) -> None:
        self._unreduced_norms: dict[int, torch.Tensor] = {}
        for chunk in self.chunks:
            for group in bucket_groups(chunk):
                # DDP calls `check_grads` before it reduces gradients, if DDP's config enables the check.
                group.check_grads = partial(self._record_norms, group, group.check_grads)

    def _record_norms(
        self, group: Any, check: Callable[..., None], check_for_large: bool = False, **unused: bool
    ) -> None:
        """Keep the norm of each bucket's gradients before the replicas reduce them, without waiting for the device.

        Args:
            check: megatron-core's check of gradients, which runs only if the flags ask for the check of large norms.
        """
        if check_for_large:
            check(check_for_nan_or_inf=False, check_for_large=True)
        self._unreduced_norms[id(group)] = torch.stack([bucket.grad_data.norm() for bucket in group.buckets])

    def watch(self, optimizer: MegatronOptimizer) -> None:
        """Check within every `optimizer.step()` that gradients are finite, before a parameter changes."""
        prepare, get_norm = optimizer.prepare_grads, optimizer.get_grad_norm

        def prepare_grads() -> bool:
            is_found = prepare()
            if is_found:  # an Inf or NaN under a constant loss scale
                self.check_norm(None)
            return is_found

        def get_grad_norm() -> float:
            norm = get_norm()
            self.check_norm(norm)
            return norm

        optimizer.prepare_grads, optimizer.get_grad_norm = prepare_grads, get_grad_norm

    def check_norm(self, norm: float | None) -> None:
        """Raise an error if the norm of all gradients is infinite, is NaN, or is None because it was not computed."""
        if norm is None or not math.isfinite(norm):
            finding = self._find_weight_or_loss() or self._find_gradient()
            self._end(f"iteration {self.iteration()}", finding, self.steps_with)

    def check_losses(self, losses: Iterable[torch.Tensor]) -> None:
        """Check that the losses of an evaluation are finite; a collective call of all ranks."""
        self.losses = losses
        self._agree(f"validation at iteration {self.iteration()}", any(map(_is_wrong, self.losses)))

    def check_weights(self) -> None:
        """Check that all weights are finite before a checkpoint is saved; a collective call of all ranks."""
        is_wrong = any(_is_wrong(parameter) for _, _, parameter in self._parameters())
        self._agree(f"checkpoint of iteration {self.iteration()}", is_wrong)

    def _agree(self, occasion: str, is_wrong: bool) -> None:
        if any(from_all_ranks(is_wrong)):
            self._end(occasion, self._find_weight_or_loss())

    def _end(self, occasion: str, finding: _Finding | None, group: dist.ProcessGroup | None = None) -> NoReturn:
        present = [each for each in from_all_ranks(finding, group) if each is not None]
        description = (
            f"{min(present).description} on rank {min(present).rank}" if present else "the norm of all gradients"
        )
        raise self.error(
            f"{occasion}: {description} is not finite: the training ends before this changes parameters or a "
            f"checkpoint; to continue in spite of it, give {SWITCH_OFF}"
        )

    def _find_weight_or_loss(self) -> _Finding | None:
        """Find the first weight that is not finite or, if all weights are finite, the first loss that is not finite."""
        for position, name, parameter in self._parameters():
            if _is_wrong(parameter):
                return _Finding(0, position, dist.get_rank(), f"the weight {name} ({_value(parameter)})")
        for loss in self.losses:
            if _is_wrong(loss):
                return _Finding(1, (0, 0), dist.get_rank(), f"the loss ({_value(loss)})")
        return None

    def _find_gradient(self) -> _Finding | None:
        """Find the non-finite gradient that was computed first, which is the last one in model order."""
        norms = self._unreduced_norms.values()
        if norms and not any(map(_is_wrong, norms)):
            return None  # the value that is not finite comes from another replica
        for (stage, index), name, parameter in reversed(list(self._parameters())):
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is not None and _is_wrong(gradient):
                description = f"the gradient of {name} ({_value(gradient)})"
                return _Finding(2, (-stage, -index), dist.get_rank(), description)
        return None

    def _parameters(self) -> Iterator[tuple[tuple[int, int], str, torch.nn.Parameter]]:
        """Yield (position, name, parameter) for this rank's parameters in model order; names count layers from 0."""
        rank = parallel_state.get_pipeline_model_parallel_rank()
        stages = {self.placement.stage_of(rank, chunk): module for chunk, module in enumerate(self.chunks)}
        for stage, chunk in sorted(stages.items()):
            model = unwrap_model(chunk)
            for index, (name, parameter) in enumerate(model.named_parameters()):
                yield (stage, index), _LAYER.sub(partial(_number_in_model, model), name), parameter


def _number_in_model(model: Any, number_in_chunk: re.Match[str]) -> str:
    return str(model.decoder.layers[int(number_in_chunk[0])].layer_number - 1)


def _is_wrong(tensor: torch.Tensor) -> bool:
    return not bool(torch.isfinite(to_local_if_dtensor(tensor)).all())


def _value(tensor: torch.Tensor) -> str:
    return "nan" if bool(torch.isnan(to_local_if_dtensor(tensor)).any()) else "inf"
