"""Runs every schedule that the flags of `benchmarks.emulate` name, and makes a table of the measurements."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from typing import Any

from benchmarks.emulation.arguments import ACTIVATION_BYTES, EmulationFlags
from benchmarks.emulation.peers import ONE_CHUNK, Peer, peer_placements
from benchmarks.emulation.predicted_reduction import Reduction, simulate_reduction
from benchmarks.emulation.ranks import Records, run_job
from benchmarks.emulation.reduction import ReductionCosts
from benchmarks.emulation.variants import contestants
from benchmarks.emulation.worker import EmulatedJob, StepRecord
from megatron.zero_bubble.cli.output import percent, table
from megatron.zero_bubble.cli.schedule.figures import stage_costs
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import Idle, Schedule, Timeline, lower, simulate
from megatron.zero_bubble.schedule.formats import schedule_from_pytorch_csv
from megatron.zero_bubble.schedule.lower import RECEIVE_AHEAD
from megatron.zero_bubble.schedule.tail import reorder_tail


@dataclass(frozen=True)
class Result:
    """The simulated and the measured times of one schedule, in milliseconds."""

    name: str
    timeline: Timeline
    """The simulated plan."""
    steps: list[list[StepRecord]]
    reduction: Reduction | None = None
    """The simulated reduction of gradients over replicas; None without a reduction."""
    edges: list[dict[int, float]] | None = None
    """Rank -> {s: milliseconds of a message between stages s and s + 1}; None for peers, which are not measured."""

    @property
    def simulated(self) -> float:
        """The simulated makespan; with replicas, the simulated time until the last gradient is reduced."""
        return float(self.timeline.makespan if self.reduction is None else self.reduction.makespan)

    @property
    def exposed_reduction(self) -> float:
        """Median measured time from the end of the last operation of all ranks to the return of the last rank."""
        return 1e3 * median(max(r.returned for r in ranks) - max(r.last_end for r in ranks) for ranks in self.steps)

    @property
    def ideal(self) -> float:
        """The time without a bubble, which is the work of the busiest rank."""
        return float(max(self.timeline.work))

    @property
    def makespans(self) -> list[float]:
        """Step -> measured time from the common start to the return of the last rank."""
        return [1e3 * (max(rank.returned for rank in ranks) - ranks[0].start) for ranks in self.steps]

    @property
    def measured(self) -> float:
        return median(self.makespans)

    @property
    def spans(self) -> list[float]:
        """Step -> longest time of a rank from its first operation to its last."""
        return [1e3 * max(rank.last_end - rank.first_start for rank in ranks) for ranks in self.steps]

    @property
    def idle(self) -> Idle:
        """Fraction of the ranks' time without planned work, if a step takes the median of the longest spans."""
        return Idle.of([median(self.spans)], self.timeline.work)

    @property
    def exposed(self) -> float | None:
        """Largest exposed communication of any rank, as a median over steps; None for peers, which are not measured."""
        worst = [max(rank.exposed or 0.0 for rank in ranks) for ranks in self.steps]
        return None if self.steps[0][0].exposed is None else 1e3 * median(worst)

    @property
    def peak_memory(self) -> list[float] | None:
        """Rank -> largest counted amount of its activations in any step, in M_B; None for peers."""
        if self.steps[0][0].peak is None:
            return None
        return [max(record.peak or 0.0 for record in records) for records in zip(*self.steps, strict=True)]

    def as_json(self) -> dict[str, Any]:
        schedule = self.timeline.schedule
        reduction = (
            {}
            if self.reduction is None
            else {
                "exposed_reduction_ms": self.exposed_reduction,
                "simulated_exposed_reduction_ms": float(self.reduction.exposed),
            }
        )
        return reduction | {
            "schedule": self.name,
            "pipeline_size": schedule.num_ranks,
            "num_microbatches": schedule.num_microbatches,
            "num_chunks": schedule.num_chunks,
            "measured_ms": self.measured,
            "simulated_ms": self.simulated,
            "ideal_ms": self.ideal,
            "span_ms": median(self.spans),
            **self.idle.as_json(),
            **{f"simulated_{name}": value for name, value in self.timeline.idle.as_json().items()},
            "exposed_communication_ms": self.exposed,
            "peak_memory": self.peak_memory,
            "simulated_peak_memory": [float(peak) for peak in self.timeline.peak_memory],
            "steps_ms": self.makespans,
            "post_validation": False,
        }


def emulate(flags: EmulationFlags) -> list[Result]:
    """Run every schedule that the flags name; also run the peers if the flags ask for peers.

    Raises:
        ScheduleError: a schedule is unknown, or impossible with the sizes in the flags.
    """
    plans = contestants(flags)
    costs, by_parameter = None, frozenset[str]()
    if flags.time_reduce is not None:
        by_parameter = frozenset(_by_parameter(plan) for plan in plans)
        costs = ReductionCosts(flags.data_parallel_size, flags.time_reduce, flags.buckets)
        plans = [one for plan in plans for one in _with_reordered_tail(plan)]
    peers = tuple(_peers(flags)) if flags.peers else ()
    longest = max([float(plan.makespan) for plan in plans] + [_one_after_the_other(peer) for peer in peers])
    job = make_job(plans, flags.steps, longest, flags.activation_bytes, flags.receive_ahead)
    job = replace(job, peers=peers, reduction=costs, tails_by_parameter=by_parameter)
    total = (1 + job.steps) * (sum(float(plan.makespan) for plan in plans) + len(peers) * longest) / 1e3
    print(f"schedules: {len(plans) + len(peers)}, steps of each: {job.steps}, about {total:.0f} s", file=sys.stderr)
    records = run_job(job)
    for name, reason in records.refused.items():
        print(f"{name} left out: {reason}", file=sys.stderr)
    ours = [
        Result(
            plan.schedule.name,
            plan,
            records.steps[plan.schedule.name],
            _simulated_reduction(plan, costs, by_parameter),
            records.edges[plan.schedule.name],
        )
        for plan in plans
    ]
    return ours + list(_peer_results(peers, records))


def run_plans(plans: Sequence[Timeline], steps: int) -> list[Result]:
    """Run the schedules of `plans`, each with its own costs and a unique name, in turns and `steps` times each."""
    records = run_job(make_job(plans, steps, max(float(plan.makespan) for plan in plans)))
    names = [plan.schedule.name for plan in plans]
    return [
        Result(name, plan, records.steps[name], None, records.edges[name])
        for name, plan in zip(names, plans, strict=True)
    ]


def make_job(
    plans: Sequence[Timeline],
    steps: int,
    longest: float,
    activation_bytes: int = ACTIVATION_BYTES,
    receive_ahead: int = RECEIVE_AHEAD,
) -> EmulatedJob:
    """Return the job that runs `plans` `steps` times; no plan needs more than `longest` milliseconds for a step."""
    return EmulatedJob(
        num_ranks=plans[0].schedule.num_ranks,
        schedules=tuple((lower(plan.schedule, receive_ahead, plan.costs), plan.costs) for plan in plans),
        steps=steps,
        activation_bytes=activation_bytes,
        timeout=timedelta(seconds=60, milliseconds=3 * longest),
    )


def _with_reordered_tail(plan: Timeline) -> Iterator[Timeline]:
    """Yield the plan and, if the backward is split, a second plan with the last W of each rank ordered by parameter."""
    yield plan
    if plan.schedule.splits_backward:
        yield simulate(replace(reorder_tail(plan.schedule), name=_by_parameter(plan)), plan.costs)


def _by_parameter(plan: Timeline) -> str:
    """Return the name of the variant of `plan` in which the last W of each rank are ordered by parameter."""
    return f"{plan.schedule.name}, tail by parameter"


def _simulated_reduction(
    plan: Timeline, costs: ReductionCosts | None, by_parameter: frozenset[str]
) -> Reduction | None:
    if costs is None:
        return None
    schedule = plan.schedule
    times = [costs.time_reduce / schedule.num_chunks] * schedule.num_stages
    return simulate_reduction(plan, times, costs.num_buckets, by_parameter=schedule.name in by_parameter)


def _peers(flags: EmulationFlags) -> Iterator[Peer]:
    for name, placement in peer_placements(flags.pipeline_size, flags.num_chunks or 2).items():
        yield Peer(name, stage_costs(flags, placement), placement, flags.num_microbatches)


def _one_after_the_other(peer: Peer) -> float:
    """Return an upper bound of the makespan in milliseconds: the time of m + p microbatches, one after the other."""
    work = [peer.costs.work(stage) for stage in range(peer.costs.num_stages)]
    return (peer.num_microbatches + peer.placement.num_ranks) * max(work) * peer.placement.num_chunks


def _peer_results(peers: tuple[Peer, ...], records: Records) -> Iterator[Result]:
    for peer in peers:
        name = f"torch {peer.name}"
        if name in records.steps:
            yield Result(name, simulate(_schedule_of(peer, records.orders[name]), peer.costs), records.steps[name])


def _schedule_of(peer: Peer, order: list[list[str]]) -> Schedule:
    if peer.name in ONE_CHUNK:
        return generate(ONE_CHUNK[peer.name], peer.placement.num_ranks, peer.num_microbatches)
    return schedule_from_pytorch_csv("".join(",".join(words) + "\r\n" for words in order), peer.name)


def emulation_table(results: list[Result], *, markdown: bool = False) -> str:
    heads: tuple[str, ...] = (
        "schedule",
        "chunks",
        "measured (ms)",
        "spread",
        "simulated",
        "above simulated",
        "span",
        *("idle", "imbalance", "bubble"),
        "exposed (ms)",
    )
    rows: list[tuple[str, ...]] = [
        (
            one.name,
            str(one.timeline.schedule.num_chunks),
            f"{one.measured:.1f}",
            f"{max(one.makespans) - min(one.makespans):.1f}",
            f"{one.simulated:.1f}",
            f"{100 * (one.measured / one.simulated - 1):+.1f}%",
            f"{median(one.spans):.1f}",
            *(percent(share) for share in (one.idle.total, one.idle.imbalance, one.idle.bubble)),
            "" if one.exposed is None else f"{one.exposed:.2f}",
        )
        for one in results
    ]
    if any(one.timeline.schedule.recomputes or one.timeline.schedule.offloads for one in results):
        heads = (*heads, "peak (M_B)", "simulated")
        rows = [(*row, *_peaks(one)) for row, one in zip(rows, results, strict=True)]
    if results[0].reduction is None:
        return table(heads, rows, markdown=markdown)
    heads = (*heads, "reduction exposed (ms)", "simulated")
    rows = [
        (*row, f"{one.exposed_reduction:.1f}", f"{float(one.reduction.exposed):.1f}" if one.reduction else "")
        for row, one in zip(rows, results, strict=True)
    ]
    return table(heads, rows, markdown=markdown)


def _peaks(one: Result) -> tuple[str, str]:
    """Return the counted and the simulated peak memory of the rank with the largest peak."""
    counted = one.peak_memory
    return "" if counted is None else f"{max(counted):.3f}", f"{float(max(one.timeline.peak_memory)):.3f}"
