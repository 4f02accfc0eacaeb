"""The passes for a step that is taken first and validated after: `with_post_validation` and `repeat`.

Clipping by the global norm and the check for Inf and NaN need the gradients of all stages. With
post-validation a rank steps as soon as its own gradients are complete (STEP) and goes on with the next
iteration; before that iteration's first backward it learns the state of all gradients and confirms the
step or amends it (VALIDATE). A step that was wrong has the forwards before VALIDATE run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.graph import Node, collective_time, dependencies, nodes_of, other_end
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import (
    COLLECTIVES,
    COMMUNICATION,
    COPIES,
    FORWARDS,
    POST_VALIDATION,
    RECEIVES,
    SENDS,
    OpKind,
)
from megatron.zero_bubble.schedule.pairs import forwards_in_pairs
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import HardwareQueues

_STEP, _VALIDATE = Op(OpKind.STEP, 0), Op(OpKind.VALIDATE, 0)


def repeat(schedule: Schedule, num_steps: int) -> Schedule:
    """`num_steps` iterations of `schedule` one after the other, with the microbatches numbered on.

    The result is for simulation and drawings. STEP and VALIDATE are numbered by iteration: the ranks'
    `STEP1` are validated by `VALIDATE2`. The first iteration, before which there is no step, validates nothing.
    """

    def moved(ops: Iterable[Op], step: int) -> Iterable[Op]:
        for op in ops:
            if op.kind is OpKind.VALIDATE and step == 0:
                continue
            yield op._replace(
                microbatch=step if op.kind in POST_VALIDATION else op.microbatch + step * schedule.num_microbatches
            )

    ops = tuple(tuple(op for step in range(num_steps) for op in moved(rank_ops, step)) for rank_ops in schedule.ops)
    return replace(schedule, num_microbatches=schedule.num_microbatches * num_steps, ops=ops)


def operation_name(op: Op, num_microbatches: int, num_steps: int) -> str:
    """The name of an operation of `num_steps` repeated iterations, such as `F3 of iteration 2`, counted from 1."""
    is_marker = op.kind in POST_VALIDATION
    step, microbatch = (op.microbatch, 0) if is_marker else divmod(op.microbatch, num_microbatches)
    name = op.kind.value if is_marker else str(op._replace(microbatch=microbatch))
    return f"{name} of iteration {step + 1}" if num_steps > 1 else name


def iteration_time(
    schedule: Schedule,
    costs: StageCosts,
    *,
    overlap_communication: bool = True,
    hardware_queues: HardwareQueues | None = None,
) -> float:
    """The time from one iteration to the next when iterations follow each other, in the unit of the costs.

    Without post-validation every iteration waits for the last rank of the one before, and this time is the makespan.
    With post-validation a rank that is done begins the next iteration, and this time is the difference between the
    makespans of three and of two iterations.
    """

    def makespan(num_steps: int) -> float:
        steps = repeat(schedule, num_steps)
        return simulate(
            steps, costs, overlap_communication=overlap_communication, hardware_queues=hardware_queues
        ).makespan

    return makespan(3) - makespan(2) if schedule.has_post_validation else makespan(1)


def with_post_validation(schedule: Schedule, costs: StageCosts) -> Schedule:
    """The same schedule with STEP at the end of every rank and VALIDATE in its warmup, without communication.

    VALIDATE stands where, in an iteration that follows another one, the state of all gradients has been
    there for as long as one forward takes: it delays nothing, a late rank hardly either, and few
    forwards have to be run again should the validation fail. It stands before the first B, BW and W of its
    rank, which add to the gradients; where the state comes later than that, the simulation shows the
    wait. It also stands before any forward whose input another rank makes after its own VALIDATE.
    """
    schedule = without_post_validation(schedule)
    stepped = replace(schedule, ops=tuple((*ops, _STEP) for ops in schedule.ops))
    lanes = simulate(repeat(stepped, 2), costs).lanes
    lengths = [len(ops) for ops in stepped.ops]
    known = max(lane[n - 1].end for lane, n in zip(lanes, lengths, strict=True)) + collective_time(costs)
    settled = known + max(costs.time_f)
    counts = []
    for rank, (lane, n) in enumerate(zip(lanes, lengths, strict=True)):
        in_pairs = forwards_in_pairs(schedule, rank)
        warmup = next(
            k for k, (op, *_) in enumerate(lane[n:]) if op.kind not in FORWARDS or schedule.ops[rank][k] in in_pairs
        )
        counts.append(sum(timed.start < settled * (1 - 1e-9) for timed in lane[n : n + warmup]))
    counts = _closed(schedule, counts)
    return replace(
        stepped,
        ops=tuple((*ops[:count], _VALIDATE, *ops[count:]) for ops, count in zip(stepped.ops, counts, strict=True)),
    )


def without_post_validation(schedule: Schedule) -> Schedule:
    """The compute operations of a schedule without those that `with_post_validation` added."""
    ops = (
        tuple(op for op in schedule.compute_ops(r) if op.kind not in POST_VALIDATION) for r in range(schedule.num_ranks)
    )
    return replace(schedule, ops=tuple(ops))


def _closed(schedule: Schedule, counts: list[int]) -> list[int]:
    """For every rank, the largest number of forwards before VALIDATE, up to `counts`, whose inputs come from forwards
    before VALIDATE."""
    while True:
        early = [ops[:count] for ops, count in zip(schedule.ops, counts, strict=True)]
        results = _results(schedule, early)
        closed = [
            next((k for k, op in enumerate(ops) if not results.issuperset(dependencies(schedule, rank, op))), len(ops))
            for rank, ops in enumerate(early)
        ]
        if closed == counts:
            return counts
        counts = closed


def _results(schedule: Schedule, ops: Sequence[Iterable[Op]]) -> set[Node]:
    """Results of these compute operations, of every rank."""
    return {node for rank, own in enumerate(ops) for op in own for node in nodes_of(schedule.placement, rank, op)}


def before_validation(schedule: Schedule, rank: int) -> tuple[Op, ...]:
    """The operations of `rank`, communication included, that are run again should the validation fail."""
    ops = schedule.ops[rank]
    return ops[: next((k for k, op in enumerate(ops) if op.kind is OpKind.VALIDATE), 0)]


def stale_receives(schedule: Schedule, rank: int) -> tuple[Op, ...]:
    """The receives of `rank`, after its VALIDATE, of messages that other ranks send before theirs.

    They are in the order of every channel. Should the validation fail, these messages were made with wrong weights.
    """
    received = set(before_validation(schedule, rank))
    return tuple(receive for receive in _sent_before_validation(schedule, rank) if receive not in received)


def _sent_before_validation(schedule: Schedule, rank: int) -> Iterator[Op]:
    """The receives of `rank` whose messages other ranks send before they validate, in the order of every channel."""
    for source in range(schedule.num_ranks):
        for op in before_validation(schedule, source):
            if op.kind in SENDS:
                destination, receive = other_end(schedule.placement, source, op)
                if destination == rank:
                    yield receive


def num_forwards_before_validation(schedule: Schedule) -> int:
    """How many forwards, recomputations among them, are run again on all ranks should the validation fail."""
    before = (op for rank in range(schedule.num_ranks) for op in before_validation(schedule, rank))
    return sum(op.kind in FORWARDS - COPIES for op in before)


def check_post_validation(schedule: Schedule) -> None:
    """Raise `InvalidSchedule` unless every rank has one STEP, its last operation, and one VALIDATE, before
    which only forwards stand whose inputs are made by forwards that stand before a VALIDATE, too, only receives
    whose messages are sent before one, and the same collectives on all ranks: what stands there can be run again."""
    for rank in range(schedule.num_ranks):
        ops = tuple(schedule.compute_ops(rank))
        for op in ops:
            if op.kind in POST_VALIDATION and op not in (_STEP, _VALIDATE):
                raise schedule.invalid(f"rank {rank} runs {op}: an iteration has {_STEP} and {_VALIDATE} only")
        for op in (_STEP, _VALIDATE):
            if ops.count(op) != 1:
                times = ops.count(op)
                raise schedule.invalid(f"rank {rank} runs {op} {times} times, not once")
        if ops[-1] != _STEP:
            raise schedule.invalid(f"rank {rank} runs {ops[-1]} after {_STEP}")
        for op in ops[: ops.index(_VALIDATE)]:
            if op.kind not in FORWARDS:
                raise schedule.invalid(f"rank {rank} runs {op} before {_VALIDATE}")
    _check_inputs_before_validation(schedule)
    for rank in range(schedule.num_ranks):
        received = {op for op in before_validation(schedule, rank) if op.kind in RECEIVES}
        for receive in sorted(received.difference(_sent_before_validation(schedule, rank))):
            raise schedule.invalid(
                f"rank {rank} runs {receive} before {_VALIDATE}, "
                f"but rank {schedule.placement.peer_of(rank, receive)} sends that message after its own"
            )


def _check_inputs_before_validation(schedule: Schedule) -> None:
    """Raise `InvalidSchedule` if an operation before VALIDATE needs a result or a message from after a VALIDATE."""
    early = [before_validation(schedule, rank) for rank in range(schedule.num_ranks)]
    computations = [[op for op in ops if op.kind not in COMMUNICATION] for ops in early]
    results = _results(schedule, computations)
    for rank, ops in enumerate(computations):
        for op in ops:
            for result, stage, microbatch in sorted(set(dependencies(schedule, rank, op)) - results):
                raise schedule.invalid(
                    f"rank {rank} runs {op} before {_VALIDATE}, but rank {schedule.placement.rank_of(stage)} runs "
                    f"{Op(result, microbatch, schedule.placement.chunk_of(stage))}, which it needs, after its own"
                )
    collectives = [{op for op in ops if op.kind in COLLECTIVES} for ops in early]
    for op in sorted(set().union(*collectives)):
        missing = next((rank for rank, here in enumerate(collectives) if op not in here), None)
        if missing is not None:
            here = next(rank for rank, ops in enumerate(collectives) if op in ops)
            raise schedule.invalid(
                f"rank {here} runs {op} before {_VALIDATE}, but rank {missing} takes part in it after its own"
            )
