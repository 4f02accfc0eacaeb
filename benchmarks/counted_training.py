"""Trains as pretrain_gpt.py does, and counts the bytes that every pipeline rank holds after each operation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.held_states import held_state_bytes, num_bytes
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.mcore.vocabulary_shard import ShardWeight
from megatron.zero_bubble.mcore.vocabulary_stage import VocabularyStep
from megatron.zero_bubble.runtime.memory_meter import SavedTensorMeter
from megatron.zero_bubble.runtime.recorder import OpRecorder
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op
from megatron.zero_bubble.schedule.kinds import VOCABULARY
from megatron.zero_bubble.session.profiling import report_plan
from megatron.zero_bubble.session.reports import print_rank_0
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.trainer.arguments import parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check
from megatron.zero_bubble.trainer.pretrain import pretrain

_HEADS = ("rank", "states (MiB)", "activations (MiB)", "in all (MiB)")


class CountingMeter:
    """Counts the memory that operations leave behind (as `SavedTensorMeter` does) and the memory of vocabulary shards.

    Attributes:
        peak: largest number of bytes after any operation since the meter was made.
    """

    def __init__(
        self, store: WeightGradStore, vocabulary: VocabularyStep | None, shards: Sequence[ShardWeight]
    ) -> None:
        self.inside = 0
        self._meter = SavedTensorMeter(store, None if vocabulary is None else vocabulary.kept_bytes)
        self._vocabulary, self._shards = vocabulary, shards
        self._saved = self.peak = 0

    def begin(self, op: Op) -> None:
        self._meter.begin(op)

    def end(self, op: Op) -> int:
        change = self._meter.end(op)
        if op.kind not in VOCABULARY:
            self._saved += change
        self.peak = max(self.peak, self._saved + num_bytes(self._held_by_shard()))
        return change

    def close(self) -> None:
        self._meter.close()

    def _held_by_shard(self) -> Iterator[torch.Tensor]:
        if self._vocabulary is not None:
            yield from self._vocabulary.held_tensors()
        yield from (shard.embedding_sum for shard in self._shards if shard.embedding_sum is not None)


class CountedForwardBackward(ForwardBackward):
    """Counts the memory of every training step; `meter` has the count of the last step."""

    shards: Sequence[ShardWeight] = ()
    meter: CountingMeter | None = None

    def _start_recording(self, vocabulary: VocabularyStep | None) -> OpRecorder:
        self._num_steps += 1
        self.meter = CountingMeter(self._store, vocabulary, self.shards)
        return self.observer.start(self._num_steps, self.meter)


class CountedSession(Session):
    """Runs schedules that count memory."""

    def start(self, model: list[torch.nn.Module], optimizer: Any, *further: Any, **options: Any) -> None:
        super().start(model, optimizer, *further, **options)
        self._model, self._optimizer = model, optimizer
        modules = chain.from_iterable(chunk.modules() for chunk in model)
        self._counted.shards = [module for module in modules if isinstance(module, ShardWeight)]

    def open_run(self, iteration: int, write_plan: Any) -> ForwardBackward:
        assert self.job.plan is not None
        assert self.store is not None
        self._counted = CountedForwardBackward(
            self.job.plan, self.store, planning=self.job.planning, report=partial(report_plan, self.job.flags)
        )
        return self._counted

    def close(self) -> None:
        """Print, for every rank, the bytes of its states and the peak of its activations in the last step."""
        assert self._counted.meter is not None
        _print_peaks(held_state_bytes(self._model, self._optimizer), self._counted.meter.peak)
        super().close()


def train(flags: Sequence[str], prog: str) -> None:
    """Train with pretrain_gpt.py's `flags`, and print the peak memory of every rank of the first pipeline.

    Raises:
        ValueError: the flags are wrong, or name no schedule of this project.
    """
    args, job = complete_and_check(parse_arguments(flags, prog), os.environ, torch.cuda.is_available())
    if job.plan is None:
        raise ValueError("megatron-core's own schedule is not counted: give --zero-bubble-schedule 1f1b")
    if torch.cuda.is_available() or args.zero_bubble_post_validation:
        raise ValueError("memory is counted on CPUs and without --zero-bubble-post-validation")
    pretrain(replace(args, eval_iters=0), CountedSession(job, prog))


def _print_peaks(held: int, peak: int) -> None:
    group = parallel_state.get_pipeline_model_parallel_group()
    counted = [(held, peak)] * group.size()
    dist.all_gather_object(counted, counted[0], group=group)
    rows = [
        (str(rank), *(f"{part / 2**20:.2f}" for part in (*parts, sum(parts)))) for rank, parts in enumerate(counted)
    ]
    print_rank_0(table(_HEADS, rows))
    for name, of_ranks in zip(_HEADS[1:], zip(*((*parts, sum(parts)) for parts in counted), strict=True), strict=True):
        print_rank_0(f"largest to smallest, {name.removesuffix(' (MiB)')}: {max(of_ranks) / min(of_ranks):.3f}")
