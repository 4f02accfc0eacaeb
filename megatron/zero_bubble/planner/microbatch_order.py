"""Chooses the order in which a schedule runs the microbatches of a step if the microbatches differ in size.

A schedule has one place for each microbatch of a step, and each microbatch of the step may run in any place. A long
microbatch delays every rank in the warmup, but only one rank in the steady state. The operations of the schedule keep
their order, so that ranks run the schedule that was lowered and validated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import inf
from operator import add, neg
from random import Random
from typing import Any, NamedTuple

from megatron.zero_bubble.planner.critical_paths import OrderGraph
from megatron.zero_bubble.planner.orders import orders_of_schedule
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import Limits, are_within, tolerance
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Infeasible
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.kinds import KINDS

WORTHWHILE = 0.005
"""A new order of the microbatches replaces the data's order if it saves at least this fraction of the step's time."""
_Places = tuple[int, ...]
"""Place in the schedule -> index of the microbatch in the data."""


class MicrobatchOrder(NamedTuple):
    """An order of the microbatches of a step, with simulated times of the step."""

    places: _Places
    """Place in the schedule -> index of the microbatch in the data."""
    time: float
    """Simulated time of the step if microbatches run in the order of `places`."""
    time_in_data_order: float
    """Simulated time of the step if microbatches run in the order of the data."""

    @property
    def gain(self) -> float:
        """Speedup: time of the step in the order of the data, divided by time of the step in the order `places`."""
        return self.time_in_data_order / self.time


def order_microbatches(
    schedule: Schedule,
    costs: Sequence[StageCosts],
    *,
    limits: Limits | None = None,
    inside: Sequence[Sequence[float]] = (),
    names: Sequence[str] = (),
    memory_text: Callable[[float], str] = "{:g}".format,
    num_tried: int = 60,
    interlocks: bool = False,
    overlap_communication: bool = True,
) -> MicrobatchOrder:
    """Search for the order of a step's microbatches that minimizes the time of a schedule.

    The search first tries four orders by size: ascending, descending, with the largest microbatches in the middle, and
    with the largest microbatches at both ends. The search then tries random changes of the best order. Equal arguments
    give equal results.

    Args:
        schedule: a schedule without post-validation, lowered or not.
        costs: costs of the stages, for each microbatch in the order of the data.
        limits: memory limit of every rank; None for no limit. Without limits the chosen order may need more memory than
            the order of the data.
        inside: temporary memory of an operation, for each microbatch and stage; zero by default.
        names: names of the microbatches, for the error message; by default their indices.
        memory_text: returns the text of an amount of memory with its unit, for the error message.
        num_tried: number of microbatch orders that are simulated.
        interlocks: whether ranks start the next iteration before all ranks have finished. With `interlocks`, orders are
            compared by the longest span of a rank; without `interlocks`, orders are compared by the makespan.
        overlap_communication: whether ranks compute while messages are in flight, as in `simulate`.

    Returns:
        The fastest simulated order of the microbatches that fits in the memory limits. If the order of the data also
        fits, and the fastest order saves less than the fraction `WORTHWHILE` of the step's time, the order of the data
        is returned.

    Raises:
        Infeasible: the microbatches exceed a memory limit in every order that was tried.
    """
    step = _Step(schedule, costs, inside, interlocks=interlocks, overlap_communication=overlap_communication)
    in_data_order = tuple(range(len(costs)))
    limits = limits or (inf,) * schedule.num_ranks
    time = best_time = step.time(in_data_order)
    best = in_data_order if step.fits(in_data_order, limits) else None
    candidates, generator = deque(_sorted_orders(costs)), Random(0)
    for _ in range(num_tried - 1 if len(costs) > 1 else 0):
        places = candidates.popleft() if candidates else _changed(best or in_data_order, generator)
        tried = step.time(places)
        if (best is None or tried < best_time - tolerance(best_time)) and step.fits(places, limits):
            best, best_time = places, tried
    if best is None:
        names = names or [f"microbatch {number}" for number in in_data_order]
        raise step.infeasible(in_data_order, limits, names, memory_text)
    if best_time > time * (1 - WORTHWHILE) and step.fits(in_data_order, limits):
        best, best_time = in_data_order, time
    return MicrobatchOrder(best, best_time, time)


def like_order(places: Sequence[int], before: Sequence[Any], sizes: Sequence[Any]) -> tuple[int, ...]:
    """Apply the microbatch order of an earlier step to a new step with microbatches of other sizes.

    The k-th smallest microbatch of the new step gets the place of the k-th smallest microbatch of the earlier step.

    Args:
        places: microbatch order of the earlier step.
        before: sizes of the microbatches of the earlier step, in the order of the data.
        sizes: sizes of the microbatches of the new step, in the order of the data; as many sizes as in `before`.
    """
    rising, rising_before = (sorted(range(len(each)), key=each.__getitem__) for each in (sizes, before))
    return tuple(rising[rising_before.index(number)] for number in places)


def _sorted_orders(costs: Sequence[StageCosts]) -> Iterator[_Places]:
    """Yield four orders of the microbatches by work: rising, falling, largest in the middle, largest at the ends."""
    work = [sum(map(each.work, range(each.num_stages))) for each in costs]
    rising = sorted(range(len(work)), key=work.__getitem__)
    yield tuple(rising)
    yield tuple(reversed(rising))
    yield (*rising[::2], *reversed(rising[1::2]))
    yield (*reversed(rising[::2]), *rising[1::2])


def _changed(places: _Places, generator: Random) -> _Places:
    """Return the order with one microbatch moved to another place, or with two microbatches exchanged."""
    changed = list(places)
    source, target = generator.sample(range(len(places)), 2)
    if generator.random() < 0.5:
        changed[source], changed[target] = changed[target], changed[source]
    else:
        changed.insert(target, changed.pop(source))
    return tuple(changed)


def _changes_of_memory(problem: Problem) -> tuple[float, ...]:
    """Code of an operation -> memory that the operation allocates or, with a negative sign, releases at its start."""
    costs, memory = problem.costs, problem.costs.memory
    changes = chain.from_iterable(memory[kind] for kind in problem.codes.kinds)
    dropped = problem.codes.costs(drop=tuple(map(neg, costs.memory_r)) or (0.0,) * costs.num_stages)
    return tuple(map(add, changes, dropped))


class _Step:
    """Simulates a step under one schedule, with the microbatches in different orders."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[StageCosts],
        inside: Sequence[Sequence[float]],
        *,
        interlocks: bool,
        overlap_communication: bool,
    ) -> None:
        assert schedule.num_microbatches == len(costs), "every microbatch has costs"
        assert not schedule.has_pairs, "the time of a pair depends on both microbatches"
        schedule = schedule.without_communication()
        self._inside = inside or [(0.0,) * schedule.num_stages] * len(costs)
        options = {"overlap_communication": overlap_communication, "takes_makespan": not interlocks}
        self._problems = [Problem.solved_by(schedule, each, **options) for each in costs]
        problem = self._problems[0]
        self._graph = graph = OrderGraph(problem, orders_of_schedule(problem, schedule))
        codes = range(len(graph.duration) // len(costs))
        self._durations = [[each.duration[code] for each in self._problems] for code in codes]
        self._latencies = [[each.latency[code] for each in self._problems] for code in codes]
        self._changes = [_changes_of_memory(each) for each in self._problems]
        self._fused = [
            (schedule.placement.stage_of(rank, op.chunk), op.microbatch)
            for rank, ops in enumerate(schedule.ops)
            for op in ops
            if len(KINDS[op.kind].makes) > 1
        ]
        """(stage, place) of each operation that fuses B and W; its input gradient is ready only at the end of W."""

    def time(self, places: _Places) -> float:
        """The simulated time of the step with microbatches in the order `places`."""
        graph = self._graph
        graph.duration = [times[number] for times in self._durations for number in places]
        graph.latency = [times[number] for times in self._latencies for number in places]
        b, w, m = graph.codes.b, graph.codes.w, len(places)
        for stage, place in self._fused:
            both, second = (b + stage) * m + place, (w + stage) * m + place
            costs = self._problems[places[place]].costs
            of_w = graph.duration[second] - (costs.saved_bw[stage] if costs.saved_bw else 0.0)
            graph.latency[both] += of_w
            graph.duration[both] += of_w
            graph.duration[second] = graph.latency[second] = 0.0
        runs = graph.find_times()
        assert runs, "an order of microbatches changes no dependency"
        return graph.cost

    def fits(self, places: _Places, limits: Limits) -> bool:
        """Whether every rank's memory stays within its limit with microbatches in the order `places`."""
        return are_within(self.peaks(places), limits)

    def peaks(self, places: _Places) -> list[float]:
        """Rank -> peak memory of the step with microbatches in the order `places`."""
        graph, m = self._graph, len(places)
        codes, fused = graph.codes, {(graph.codes.b + stage) * m + place for stage, place in self._fused}

        def needed(lane: Sequence[int]) -> Iterator[float]:
            memory = 0.0
            for op in lane:
                code, place = divmod(op, m)
                number = places[place]
                changes = self._changes[number]
                change = 0.0 if op in fused else changes[code + codes.drop * (op in graph.dropped)]
                if op - (codes.w - codes.b) * m in fused:  # a BW is counted at its W
                    change += changes[code - codes.w + codes.b]
                memory += change
                yield memory - min(change, 0.0) + self._inside[number][code % codes.b]

        return [max(needed(lane)) for lane in graph.lanes]

    def infeasible(
        self, places: _Places, limits: Limits, names: Sequence[str], text: Callable[[float], str]
    ) -> Infeasible:
        """The error for a step that exceeds memory limits, with the fullest rank and the rank's largest microbatch."""
        peaks = self.peaks(places)
        rank = max(range(len(peaks)), key=lambda rank: peaks[rank] / limits[rank])
        kept = [sum(map(problem.costs.memory_f.__getitem__, problem.stages_of[rank])) for problem in self._problems]
        largest = kept.index(max(kept))
        return Infeasible(
            f"the microbatches of this step need {text(peaks[rank])} of memory on rank {rank}, above the limit of "
            f"{text(limits[rank])}; the largest, {names[largest]}, keeps {text(kept[largest])} alone",
            max(peaks),
        )
