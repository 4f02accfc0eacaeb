"""Changes of a training: faults that strike it, and other conditions that it runs under.

A change stands among the flags of a training in `tests.trainings`. Each of its ranks enters the context manager.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist


class Run(NamedTuple):
    """One training of a job."""

    folder: Path
    """The folder in which all trainings of the job write their files."""
    name: str


class Change:
    def applied(self, run: Run) -> AbstractContextManager[None]:
        """The change holds within."""
        raise NotImplementedError


@dataclass(frozen=True)
class AtReducedGradients(Change):
    """Something that happens to a pipeline rank in an iteration, right after gradients are reduced over replicas."""

    iteration: int
    """Counted from 1."""
    rank: int

    def happen(self, chunks: list[Any]) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from megatron.core import parallel_state

        from megatron.zero_bubble.mcore import step_call

        finalize, iterations = step_call.finalize_gradients, count(1)

        def finalize_and_happen(config: Any, placement: Any, chunks: list[Any], *more: Any) -> None:
            finalize(config, placement, chunks, *more)
            if (next(iterations), parallel_state.get_pipeline_model_parallel_rank()) == (self.iteration, self.rank):
                self.happen(chunks)

        with mock.patch.object(step_call, "finalize_gradients", finalize_and_happen):
            yield


class InfiniteGradient(AtReducedGradients):
    """A gradient is infinite."""

    def happen(self, chunks: list[Any]) -> None:
        for parameter in chunks[0].parameters():
            parameter.main_grad.view(-1)[0] = float("inf")


class KilledRank(AtReducedGradients):
    """The rank dies, before the optimizer's step."""

    def happen(self, chunks: list[Any]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Signalled(AtReducedGradients):
    """The rank gets a signal."""

    number: signal.Signals

    def happen(self, chunks: list[Any]) -> None:
        signal.raise_signal(self.number)


KILLED_AT = {
    "in the step": "_is_wrong",
    "between step and validation": "step",
    "in a rollback": "_clip_and_step",
}
"""Places around an optimizer step that is validated later: methods of `PostValidation`, after which a rank dies."""


@dataclass(frozen=True)
class KilledAroundValidation(Change):
    """The last pipeline rank dies when it has come to a place of KILLED_AT as often as this."""

    place: str
    times: int

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from megatron.core import parallel_state

        from megatron.zero_bubble.mcore.post_validation import PostValidation

        method, calls = getattr(PostValidation, KILLED_AT[self.place]), count(1)

        def counted(post_validation: Any, *args: Any) -> Any:
            is_last = next(calls) == self.times and parallel_state.is_pipeline_last_stage()
            result = method(post_validation, *args)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        with mock.patch.object(PostValidation, KILLED_AT[self.place], counted):
            yield


@dataclass(frozen=True)
class NoStepWaits(Change):
    """Every wrong step of post-validation is amended, also if many steps before it were wrong."""

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from megatron.zero_bubble.runtime.recent_steps import RecentSteps

        with mock.patch.object(RecentSteps, "next_waits", False):
            yield


SPOILED_WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"
"""The parameter that is spoiled, in the chunk whose forward step runs."""


@dataclass(frozen=True)
class Spoiled(Change):
    """A value that is not finite, put into the model during a forward step. The training must then end."""

    rank: int
    """A global rank."""
    forward_step: int
    """The number of the forward step on this rank, counted from 1."""

    def spoil(self, model: Any, output: torch.Tensor) -> torch.Tensor:
        """Put the value in; returns the output of the forward step."""
        raise NotImplementedError

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from megatron.zero_bubble.session.start_up import SessionError
        from megatron.zero_bubble.trainer import loop

        make_forward_step, calls = loop.make_forward_step, count(1)

        def make_spoiled(*args: Any, **options: Any) -> Any:
            forward_step = make_forward_step(*args, **options)

            def spoiled_step(data_iterator: Any, model: Any) -> Any:
                output, loss_func = forward_step(data_iterator, model)
                if (dist.get_rank(), next(calls)) == (self.rank, self.forward_step):
                    output = self.spoil(model, output)
                return output, loss_func

            return spoiled_step

        with mock.patch.object(loop, "make_forward_step", make_spoiled):
            try:
                yield
            except SessionError as error:
                tell_and_clear_up(error)


def tell_and_clear_up(error: Exception) -> None:
    """Print what each rank is told, and prepare for the next training."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

    from megatron.zero_bubble.session.reports import print_rank_0

    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, str(error))
    print_rank_0("\n".join(f"ended: {line}" for line in set(told)))
    parallel_state.destroy_model_parallel()
    unset_num_microbatches_calculator()


class SpoiledWeight(Spoiled):
    def spoil(self, model: Any, output: torch.Tensor) -> torch.Tensor:
        _weight(model).data.view(-1)[5] = float("nan")
        return output


class SpoiledUnusedWeight(Spoiled):
    """In the row of a token that the data does not have."""

    def spoil(self, model: Any, output: torch.Tensor) -> torch.Tensor:
        from megatron.core.utils import unwrap_model

        unwrap_model(model).embedding.word_embeddings.weight.data[-1, 5] = float("nan")
        return output


class SpoiledGradient(Spoiled):
    def spoil(self, model: Any, output: torch.Tensor) -> torch.Tensor:
        _weight(model).main_grad.view(-1)[5] = float("inf")
        return output


class SpoiledOutput(Spoiled):
    def spoil(self, model: Any, output: torch.Tensor) -> torch.Tensor:
        return output + float("inf")


def _weight(model: Any) -> Any:
    from megatron.core.utils import unwrap_model

    return unwrap_model(model).get_parameter(SPOILED_WEIGHT)


@dataclass(frozen=True)
class NcclRules(Change):
    """Messages and reductions keep NCCL's rules, with delays from this seed."""

    seed: int

    def applied(self, run: Run) -> AbstractContextManager[None]:
        from tests.nccl_over_gloo import nccls_rules

        return nccls_rules(self.seed)


@dataclass(frozen=True)
class WarmedUp(Change):
    """Every stage computes once before the first step, as it does on a GPU; a line says so.

    The largest logit, which a forward of attention records in its module, is as before.
    """

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from megatron.zero_bubble.mcore import schedule_runner
        from megatron.zero_bubble.session import running
        from megatron.zero_bubble.session.reports import print_rank_0

        warm_up = schedule_runner.warm_up

        def record(chunk: Any, inputs: Any) -> None:
            chunk.current_max_attn_logits, chunk.was_run[:] = 1.0, [True]

        def warm_up_and_tell(stage: Any, *args: Any, **options: Any) -> None:
            for chunk in stage.call.chunks:
                chunk.current_max_attn_logits, chunk.was_run = None, []
            hooks = [chunk.register_forward_pre_hook(record) for chunk in stage.call.chunks]
            warm_up(stage, *args, **options)
            for chunk, hook in zip(stage.call.chunks, hooks, strict=True):
                hook.remove()
                assert (chunk.current_max_attn_logits, chunk.was_run) == (None, [True])
            print_rank_0("warmed up")

        def warming_up(*args: Any, **settings: Any) -> schedule_runner.ForwardBackward:
            run = schedule_runner.ForwardBackward(*args, **settings)
            run.warms_up = True
            return run

        with (
            mock.patch.object(running, "ForwardBackward", warming_up),
            mock.patch.object(schedule_runner, "warm_up", warm_up_and_tell),
        ):
            yield


@dataclass(frozen=True)
class BothOrdersTried(Change):
    """megatron-core's own order is tried whatever gain the plan is predicted to have."""

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from megatron.zero_bubble.runtime import replanner

        with mock.patch.object(replanner, "SMALL_GAIN", float("inf")):
            yield


@dataclass(frozen=True)
class RecordedCollectives(Change):
    """Each rank writes the collectives that it starts to `NAME.RANK.calls`."""

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from tests.collectives import recorded_collectives

        with recorded_collectives() as calls:
            yield
        (run.folder / f"{run.name}.{dist.get_rank()}.calls").write_text(json.dumps(calls))
