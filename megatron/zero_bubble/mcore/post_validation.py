"""Takes the optimizer's step without a global synchronization, validates the step later, and amends a wrong step.

Before megatron-core's step updates a parameter, the step all-reduces the squared gradient norm over all stages and,
with a loss scale, a flag for gradients that are not finite. With post-validation each stage checks only its own
gradients, starts the reductions over all stages in the background, and takes the optimizer's step. The reductions over
all stages complete during the next iteration's warmup and usually confirm the step. If the reductions show that
gradients should have been clipped, the step is undone and repeated with clipped gradients. If the reductions show that
the step should have been skipped, the step is only undone. If several recent steps were wrong, each rank takes its next
optimizer step only after the reductions. The updated parameters equal megatron-core's parameters bit for bit, because
the reductions have the same inputs and process group as in megatron-core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.utils import get_model_config

from megatron.zero_bubble.mcore.buckets import bucket_groups
from megatron.zero_bubble.mcore.optimizer import (
    Norm,
    copy_to_model,
    norm_groups,
    norm_of_all,
    parts,
    squared_norm,
    torch_optimizers,
)
from megatron.zero_bubble.runtime.recent_steps import RecentSteps
from megatron.zero_bubble.runtime.rollback import Rollback, settings_of, with_settings


@dataclass(frozen=True)
class StepOutcome:
    """The result of an optimizer step; megatron-core's `optimizer.step()` returns the first three fields."""

    was_updated: bool
    grad_norm: float | None
    num_zeros: float | None = None
    was_amended: bool = False
    """Whether forwards of the next iteration have used parameters or a loss scale that are no longer valid."""
    num_redone_forwards: int = 0
    """Number of operations such as F and R, over all ranks of a pipeline, that run again after a wrong step."""
    has_waited: bool = False
    """Whether the optimizer step waited for its validation, because too many of the previous steps were wrong."""


@dataclass
class _Pending:
    """An optimizer step that was taken or withheld and is not yet validated."""

    has_stepped: bool
    waits: bool
    """Whether every rank withholds the step until its validation, because many recent steps were wrong."""
    squared_norms: list[torch.Tensor]
    """Squared gradient norms: one per optimizer, or a single one if all optimizers share a process group."""
    found_inf: list[torch.Tensor]
    """For each loss scale, a tensor of two flags: whether an Inf or NaN was found, and whether any rank has stepped."""
    reductions: list[Any]
    """The reductions of `squared_norms` and `found_inf` over all stages, which run in the background."""
    scales: list[dict[str, Any]]
    """The loss scales before the optimizer step."""
    settings: list[dict[str, Any]]
    """Settings of the parameter groups after the optimizer step; a scheduler may change them later."""


class PostValidation:
    """Takes the steps of a megatron-core optimizer without waiting for other stages, and validates the steps later.

    Args:
        optimizer: the optimizer that `get_megatron_optimizer` has made.
        rollback: undoes a step of the torch optimizers in `optimizer`.
        model_chunks: this rank's model chunks, wrapped in DDP.

    Attributes:
        settled: function that is called with the outcome of every step after the validation and any amendment of the
            step.
        check_norm: function that every validation calls with the norm of all gradients, or with None if an Inf or NaN
            was found; `check_norm` may raise an error, before a wrong step is amended.
    """

    def __init__(self, optimizer: MegatronOptimizer, rollback: Rollback, model_chunks: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._optimizers = parts(optimizer)
        self._rollback = rollback
        self._chunks = model_chunks
        self._clip = optimizer.config.clip_grad
        self._num_instances = model_chunks[0].ddp_config.num_distributed_optimizer_instances
        self._pending: _Pending | None = None
        self._recent = RecentSteps()
        self.settled: Callable[[StepOutcome], None] = lambda outcome: None
        self.check_norm: Callable[[float | None], None] = lambda norm: None

    @property
    def is_pending(self) -> bool:
        """Whether the last optimizer step is not validated yet, so that parameters may still change."""
        return self._pending is not None

    @property
    def waits(self) -> bool:
        """Whether the last optimizer step must be validated before the next iteration's first forward."""
        return self._pending is not None and self._pending.waits

    @torch.no_grad()
    def step(self) -> None:
        """Take the optimizer's step without waiting for other stages.

        The step is withheld until validation if several recent steps were wrong, or if this stage's gradients already
        show that the step would be wrong.
        """
        assert self._pending is None, "the last step has to be validated first"
        flags = self._prepare_gradients()
        norms = [(squared_norm(optimizers), group) for optimizers, group in norm_groups(self._optimizer)]
        waits = self._recent.next_waits
        has_stepped = not self._is_wrong(flags, [norm for norm, _ in norms]) and not waits
        reductions = [dist.all_reduce(norm, group=group, async_op=True) for norm, group in norms]
        found_inf = [torch.cat([flag, torch.full_like(flag, float(has_stepped))]) for flag, _ in flags]
        for flag_and_step, (_, optimizer) in zip(found_inf, flags, strict=True):
            group = optimizer.get_grad_stats_parallel_group()
            reductions.append(dist.all_reduce(flag_and_step, dist.ReduceOp.MAX, group=group, async_op=True))
        scales = [scaler.state_dict() for scaler in self._scalers()]
        if has_stepped:
            self._rollback.before_step()
            self._confirm_scales()
            self._step_and_keep_gradients()
        settings = settings_of(self._optimizer.param_groups)
        squared_norms = [norm for norm, _ in norms]
        self._pending = _Pending(has_stepped, waits, squared_norms, found_inf, reductions, scales, settings)

    @torch.no_grad()
    def validate(self, num_early_forwards: int = 0) -> bool:
        """Wait for the reductions of gradient norm and Inf flags, and amend the last optimizer step if it was wrong.

        Args:
            num_early_forwards: number of operations such as F and R, over all ranks of a pipeline, that have run since
                the step, and must run again if the step was wrong.

        Returns:
            Whether the step was wrong on any rank; every rank gets the same answer.
        """
        if self._pending is None:
            return False
        pending, self._pending = self._pending, None
        for reduction in filter(None, pending.reductions):
            reduction.wait()
        infinite = [bool(found[0] > 0) for found in pending.found_inf]
        norm = None if any(infinite) else norm_of_all(pending.squared_norms)
        self.check_norm(None if norm is None else float(norm))
        with with_settings(self._optimizer.param_groups, pending.settings):
            was_wrong = self._amend(pending, infinite, norm)
        self._recent.record(any(infinite) or self._clips(norm))
        if not self._recent.next_waits:
            self._rollback.prepare()
        self.settled(
            StepOutcome(
                was_updated=not any(infinite),
                grad_norm=None if norm is None else float(norm),
                was_amended=was_wrong and not pending.waits,
                num_redone_forwards=num_early_forwards if was_wrong else 0,
                has_waited=pending.waits,
            )
        )
        return was_wrong

    def parameters_changed(self) -> None:
        """Record that parameters changed outside of a step, so that undoing the next step keeps these changes."""
        assert self._pending is None, "the last step has to be validated first"
        self._rollback.prepare()

    def _amend(self, pending: _Pending, infinite: list[bool], norm: Norm | None) -> bool:
        """Amend the last optimizer step if it was wrong; return whether the step was wrong on any rank."""
        if any(infinite):
            self._skip(pending, infinite)
            return any(bool(found[1] > 0) for found in pending.found_inf) or self._scales_forwards(pending)
        if self._clips(norm):
            self._clip_and_step(pending, norm)
            return True
        if not pending.has_stepped:
            self._confirm_scales()
            self._step_again()
        # If the norm is not finite, clipping may change nothing, but the rank with the wrong gradients has withheld its
        # step, so that forwards have used old parameters.
        return norm is not None and not math.isfinite(norm)

    def _step_and_keep_gradients(self) -> None:
        """Take the optimizer's step; raise `ValueError` if it changes gradients, which repeating the step needs."""
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        versions = [gradient._version for gradient in gradients]
        self._optimizer.step_with_ready_grads()
        if versions != [gradient._version for gradient in gradients]:
            names = {type(optimizer).__name__ for optimizer in torch_optimizers(self._optimizer)}
            raise ValueError(
                f"{', '.join(sorted(names))}.step() changes gradients in place, but post-validation may "
                "have to repeat the step: choose an optimizer that leaves gradients unchanged"
            )

    def _scales_forwards(self, pending: _Pending) -> bool:
        """Tell whether auxiliary losses, which use the loss scale in the forward, have used an outdated loss scale."""
        config = get_model_config(self._chunks[0])
        if config.num_moe_experts is None and not getattr(config, "mtp_num_layers", None):
            return False
        scalers = zip(self._scalers(), pending.scales, strict=True)
        return any(bool(scaler.scale != before.get("scale", scaler.scale)) for scaler, before in scalers)

    def _prepare_gradients(self) -> list[tuple[torch.Tensor, MixedPrecisionOptimizer]]:
        """Run megatron-core's `prepare_grads` without reducing Inf flags; return pairs (local Inf flag, optimizer)."""
        flags = []
        for optimizer in self._optimizers:
            scaler = getattr(optimizer, "grad_scaler", None)
            if scaler is None:
                optimizer.prepare_grads()
                continue
            flag = optimizer.found_inf.zero_()
            if not optimizer.is_stub_optimizer:
                optimizer._copy_model_grads_to_main_grads()
                gradients = optimizer._collect_main_grad_data_for_unscaling()
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, scaler.inv_scale)
            flags.append((flag, optimizer))
        return flags

    def _is_wrong(self, flags: list[tuple[torch.Tensor, MixedPrecisionOptimizer]], norms: list[torch.Tensor]) -> bool:
        """Tell whether this rank's gradients show that an optimizer step would be wrong.

        With a distributed optimizer, the gradients on all ranks of the stage are checked.
        """
        zero = torch.zeros(1, device=norms[0].device)
        state = torch.cat([sum((flag for flag, _ in flags), zero), sum(norms, zero)])
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        if group.size() > 1 and self._optimizer.config.use_distributed_optimizer:
            # The ranks of a stage exchange parameters in a step, so either all of them step or none.
            dist.all_reduce(state, group=group)
        inf, squared = state.tolist()
        # Each instance of the distributed optimizer has all gradients, so that the sum counts them several times.
        squared /= self._num_instances
        return inf > 0 or not math.isfinite(squared) or self._clips(squared**0.5)

    def _clips(self, norm: Norm | None) -> bool:
        """Tell whether megatron-core's clipping changes gradients of norm `norm`; a NaN norm causes no clipping."""
        return norm is not None and self._clip > 0.0 and bool(self._clip / (norm + 1.0e-6) < 1.0)

    def _skip(self, pending: _Pending, infinite: list[bool]) -> None:
        if pending.has_stepped:
            self._rollback.undo()
            copy_to_model(self._optimizer)
            self._gather()
        for scaler, before, is_infinite in zip(self._scalers(), pending.scales, infinite, strict=True):
            scaler.load_state_dict(before)
            scaler.update(is_infinite)

    def _clip_and_step(self, pending: _Pending, norm: Norm | None) -> None:
        if pending.has_stepped:
            self._rollback.undo()
        else:
            self._confirm_scales()
        for optimizer in self._optimizers:
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grads.clip_grad_by_total_norm_fp32(parameters, self._clip, norm)
        self._step_again()

    def _confirm_scales(self) -> None:
        """Tell every loss scaler that a step had finite gradients; the scaler may then increase its loss scale."""
        for scaler in self._scalers():
            scaler.update(False)

    def _step_again(self) -> None:
        self._optimizer.step_with_ready_grads()
        # With overlapped gathering, forwards may have gathered parameters of the wrong step.
        if self._optimizer.config.overlap_param_gather:
            self._gather()

    def _gather(self) -> None:
        """With a distributed optimizer, gather the replicas' parameter shards again after a step was amended.

        If a gather is in flight, a forced `start_param_sync` starts no new gather and only waits for this gather, which
        may contain parameters of the wrong step. Gathers in flight are therefore completed before new gathers start.
        """
        if not self._optimizer.config.use_distributed_optimizer:
            return
        for chunk in self._chunks:
            for bucket_group in bucket_groups(chunk):
                if bucket_group.param_gather_handle is not None:
                    bucket_group.start_param_sync(force_sync=True)
            chunk.start_param_sync(force_sync=True)
            # megatron-core 0.16 and 0.17 leave this out after a forced gather: transposed copies would stay outdated.
            if quantized := [parameter for parameter in chunk.parameters() if is_float8tensor(parameter)]:
                post_all_gather_processing(quantized)

    def _scalers(self) -> list[Any]:
        scalers = (getattr(optimizer, "grad_scaler", None) for optimizer in self._optimizers)
        return [scaler for scaler in scalers if scaler is not None]
