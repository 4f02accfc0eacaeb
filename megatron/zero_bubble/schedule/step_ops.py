"""Adds the STEP and VALIDATE of post-validation to a schedule, and repeats a schedule for several iterations.

Clipping by the global norm and the check for Inf and NaN need the gradients of all stages. With post-validation a rank
takes its optimizer step (STEP) as soon as its own gradients are complete, and starts the next iteration. Before its
first backward of the next iteration, a rank receives the norm of all gradients and learns whether all gradients are
finite. In VALIDATE, a rank confirms or amends its optimizer step, depending on the norm of all gradients and on whether
all gradients are finite. If a rank amends its optimizer step, the rank repeats the forwards that it ran before
VALIDATE.
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
    """Repeat a schedule for several iterations, for simulations and drawings.

    The microbatches of all iterations are numbered consecutively. STEP and VALIDATE are numbered by iteration:
    `VALIDATE2` validates `STEP1` of all ranks. The first iteration has no VALIDATE, because no optimizer step precedes
    the first iteration.
    """

    def moved(op: Op, step: int) -> Op:
        is_marker = op.kind in POST_VALIDATION
        return op._replace(microbatch=step if is_marker else op.microbatch + step * schedule.num_microbatches)

    ops = tuple(
        tuple(moved(op, step) for step in range(num_steps) for op in own if step or op.kind is not OpKind.VALIDATE)
        for own in schedule.ops
    )
    return replace(schedule, num_microbatches=schedule.num_microbatches * num_steps, ops=ops)


def operation_name(op: Op, num_microbatches: int, num_steps: int) -> str:
    """The name of an operation of a repeated schedule, such as `F3 of iteration 2`.

    Args:
        op: operation of the repeated schedule.
        num_microbatches: number of microbatches of one iteration.
        num_steps: number of iterations of the repeated schedule; if above 1, the name states the iteration.
    """
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
    """The time of one iteration in a sequence of iterations, in the unit of the costs.

    Without post-validation, an iteration starts when all ranks have finished the previous iteration, and the time of an
    iteration is its makespan. With post-validation a rank starts an iteration as soon as the rank itself has finished
    the previous iteration. With post-validation the returned time is the makespan of three iterations minus the
    makespan of two iterations. The options are those of `simulate`.
    """

    def makespan(num_steps: int) -> float:
        steps = repeat(schedule, num_steps)
        return simulate(
            steps, costs, overlap_communication=overlap_communication, hardware_queues=hardware_queues
        ).makespan

    return makespan(3) - makespan(2) if schedule.has_post_validation else makespan(1)


def with_post_validation(schedule: Schedule, costs: StageCosts) -> Schedule:
    """Insert STEP at the end and VALIDATE among the warmup forwards of every rank, and remove communication.

    The planned start of VALIDATE is the arrival time of the norm of the previous iteration's gradients, plus the time
    of the longest forward. Because VALIDATE is planned to start one forward later than necessary, a slightly late rank
    does not delay the other ranks. Only the few forwards before VALIDATE are run again if the validation fails.
    VALIDATE comes before the first B, BW and W of the rank, even if the rank then has to wait for the norm of all
    gradients. If a rank makes a tensor after VALIDATE, the forward that uses the tensor also comes after VALIDATE on
    its own rank.

    Args:
        schedule: schedule of one iteration.
        costs: costs of the stages, from which the arrival time of the norm of all gradients is simulated.
    """
    schedule = schedule.without(POST_VALIDATION)
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


def _closed(schedule: Schedule, counts: list[int]) -> list[int]:
    """Rank -> number of forwards that can come before VALIDATE, at most `counts[rank]`.

    A forward can come before VALIDATE only if every input of the forward is computed before VALIDATE, too.
    """
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
    """The results of compute operations; `ops` has the operations of each rank."""
    return {node for rank, own in enumerate(ops) for op in own for node in nodes_of(schedule.placement, rank, op)}


def before_validation(schedule: Schedule, rank: int) -> tuple[Op, ...]:
    """The operations of `rank` before VALIDATE, with communication; they run again if the validation fails."""
    ops = schedule.ops[rank]
    return ops[: next((k for k, op in enumerate(ops) if op.kind is OpKind.VALIDATE), 0)]


def stale_receives(schedule: Schedule, rank: int) -> tuple[Op, ...]:
    """The receives that `rank` posts after its VALIDATE, for messages that are sent before the sender's VALIDATE.

    If the validation fails, a message that was sent before VALIDATE carried a wrong tensor. The receives of each
    channel are in the order in which the messages are sent.
    """
    received = set(before_validation(schedule, rank))
    return tuple(receive for receive in _sent_before_validation(schedule, rank) if receive not in received)


def _sent_before_validation(schedule: Schedule, rank: int) -> Iterator[Op]:
    """Yield the receives on `rank` for messages that other ranks send before their VALIDATE, in the order of sends."""
    for source in range(schedule.num_ranks):
        for op in before_validation(schedule, source):
            if op.kind in SENDS:
                destination, receive = other_end(schedule.placement, source, op)
                if destination == rank:
                    yield receive


def num_forwards_before_validation(schedule: Schedule) -> int:
    """The total number of forward computations (such as F, R and E) that are run again if the validation fails."""
    before = (op for rank in range(schedule.num_ranks) for op in before_validation(schedule, rank))
    return sum(op.kind in FORWARDS - COPIES for op in before)


def check_post_validation(schedule: Schedule) -> None:
    """Check that STEP and VALIDATE of a schedule are in allowed places.

    Every rank has one STEP, which is its last operation, and one VALIDATE. All computations before VALIDATE can be run
    again, and all inputs of these computations are computed before VALIDATE. A message that is received before VALIDATE
    is also sent before VALIDATE. A collective comes before VALIDATE either on all ranks or on no rank.

    Raises:
        InvalidSchedule: STEP, VALIDATE or an operation before VALIDATE is not in an allowed place.
    """
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
                f"but rank {schedule.placement.peer_of(rank, receive)} sends that message after its own {_VALIDATE}"
            )


def _check_inputs_before_validation(schedule: Schedule) -> None:
    """Check the inputs and the collectives of the operations before VALIDATE."""
    early = [before_validation(schedule, rank) for rank in range(schedule.num_ranks)]
    computations = [[op for op in ops if op.kind not in COMMUNICATION] for ops in early]
    results = _results(schedule, computations)
    for rank, ops in enumerate(computations):
        for op in ops:
            for result, stage, microbatch in sorted(set(dependencies(schedule, rank, op)) - results):
                raise schedule.invalid(
                    f"rank {rank} runs {op} before {_VALIDATE}, but rank {schedule.placement.rank_of(stage)} runs "
                    f"{Op(result, microbatch, schedule.placement.chunk_of(stage))}, which it needs, after its own "
                    f"{_VALIDATE}"
                )
    collectives = [{op for op in ops if op.kind in COLLECTIVES} for ops in early]
    for op in sorted(set().union(*collectives)):
        missing = next((rank for rank, here in enumerate(collectives) if op not in here), None)
        if missing is not None:
            here = next(rank for rank, ops in enumerate(collectives) if op in ops)
            raise schedule.invalid(
                f"rank {here} runs {op} before {_VALIDATE}, but rank {missing} takes part after its own {_VALIDATE}"
            )
