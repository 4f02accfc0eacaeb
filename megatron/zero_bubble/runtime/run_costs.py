"""Measures the costs of all stages while a run trains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.profiler import Profiler, combine_costs
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import MeasuredOp, step_time
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.block_groups import with_memory_of_all_groups
from megatron.zero_bubble.schedule.formats import Profile, Setting


class RunCosts:
    """Measures the costs of pipeline stages during a run; each rank measures its own stages.

    Args:
        placement: assigns stages to ranks.
        rank: this process's pipeline rank.
        observer: provides the measured operations of each step.
        measure_messages: a collective call that measures the time of a message for each stage boundary of this rank,
            and the time of a collective of vocabulary shards (0 without vocabulary shards).
        recomputation: counts the blocks of layers that this rank recomputes; None if nothing is recomputed.
        offload: measures the copies to the host and back; None if nothing is offloaded.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        observer: StepObserver,
        measure_messages: Callable[[], tuple[Mapping[int, float], float]],
        recomputation: RecomputationStore | None = None,
        offload: OffloadStore | None = None,
    ) -> None:
        self._placement, self.rank = placement, rank
        self.observer, self._measure_messages = observer, measure_messages
        self._recomputation, self._offload = recomputation, offload
        self._profiler = Profiler(placement, rank)
        self._edges: Mapping[int, float] = {}
        self._collective = 0.0
        self.center: Callable[[Sequence[float]], float] = statistics.median
        """Computes one time from the samples of an operation, for example the median."""
        self.ratio_of_pairs: float | None = None
        """Time of F and B as a pair, divided by the time of F and B one after the other, in the last profile."""

    def add(self, ops: Sequence[MeasuredOp]) -> None:
        """Add the operations of one step to the next profile."""
        self._profiler.add(ops)

    def measure_messages(self) -> None:
        """Measure the times of messages and collectives for all later profiles; a collective call."""
        self._edges, self._collective = self._measure_messages()

    def profile(
        self,
        model: Mapping[str, Setting],
        groups: Sequence[int],
        center: Callable[[Sequence[float]], float] | None = None,
    ) -> Profile:
        """Make a profile from the steps that all ranks have added since the last profile; a collective call.

        Args:
            model: the model's settings on which the costs depend.
            groups: stage -> number of groups for recomputation in the schedule that ran (see `Schedule.groups`).
            center: computes one time from the samples of an operation; `RunCosts.center` by default.
        """
        self.observer.flush()
        chunks = self._profiler.costs(center or self.center, self._recomputation, self._offload)
        gathered = from_all_ranks((chunks, self._edges))
        costs, noise, inside, self.ratio_of_pairs = combine_costs(self._placement, gathered)
        self._profiler = Profiler(self._placement, self.rank)
        if costs.has_vocabulary:
            others = self._placement.num_stages - self._placement.num_ranks
            costs = replace(costs, latency_collective=(self._collective,) * self._placement.num_ranks + (0.0,) * others)
        return Profile(self._placement, with_memory_of_all_groups(costs, groups), noise, model, inside)

    def add_checked(self, steps: list[Sequence[MeasuredOp]]) -> float:
        """Base the next profile on `steps` only; return the mean milliseconds of a step on the slowest rank.

        `add_checked` is a collective call. The result is a mean rather than a median, so that unusually long operations
        count. Each rank leaves out its slowest step, which another process may have interrupted.

        Args:
            steps: the measured operations of each step; `add_checked` empties this list.
        """
        self.observer.flush()
        self._profiler = Profiler(self._placement, self.rank)
        spans = [step_time(ops).span * 1000.0 for ops in steps]
        slowest = spans.index(max(spans))
        del spans[slowest], steps[slowest]
        for ops in steps:
            self.add(ops)
        steps.clear()
        return max(from_all_ranks(statistics.fmean(spans)))
