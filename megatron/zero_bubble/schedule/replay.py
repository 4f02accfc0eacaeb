"""What waits for what, and the order in which a schedule can run: shared by `validate` and `simulate`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from megatron.zero_bubble.schedule.errors import Deadlock
from megatron.zero_bubble.schedule.ir import SPLIT_WEIGHT_GRADIENTS, OpKind, Placement, Schedule

Node = tuple[OpKind, int, int]
"""(kind, stage, microbatch): an operation, named by its stage instead of its rank and chunk. BW is a B."""


def dependencies(placement: Placement, kind: OpKind, stage: int, microbatch: int) -> list[Node]:
    """The compute operations that have to end before this compute operation can start.

    F waits for F of the stage before; B and BW for the stage's own F and for the backward of the stage
    after; W for its own B. VALIDATE waits for the STEP of every rank in the iteration before; a rank is named by
    the stage of its first chunk.
    """
    if kind is OpKind.STEP:
        return []
    if kind is OpKind.VALIDATE:
        before = microbatch - 1
        ranks = range(placement.num_ranks) if before >= 0 else ()
        return [(OpKind.STEP, placement.stage_of(rank), before) for rank in ranks]
    if kind is OpKind.F:
        return [(OpKind.F, stage - 1, microbatch)] if stage > 0 else []
    if kind in SPLIT_WEIGHT_GRADIENTS:
        return [(OpKind.B, stage, microbatch)]
    own = (OpKind.F, stage, microbatch)
    return [own, (OpKind.B, stage + 1, microbatch)] if stage < placement.num_stages - 1 else [own]


def replay(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yield the (rank, position) of every operation in an order that respects all dependencies.

    Every rank runs its operations in order; an operation that lacks an input blocks its rank. What crosses ranks is
    there once it was computed. The schedule is not lowered: messages are `streams`' affair.
    Takes time linear in the number of operations. Raises `Deadlock` when all unfinished ranks are blocked.
    """
    done: set[Node] = set()
    blocked: dict[Node, list[int]] = {}
    next_position = [0] * schedule.num_ranks
    runnable = deque(range(schedule.num_ranks))
    while runnable:
        rank = runnable.popleft()
        ops = schedule.ops[rank]
        while next_position[rank] < len(ops):
            missing = _first_missing(schedule, rank, next_position[rank], done)
            if missing is not None:
                blocked.setdefault(missing, []).append(rank)
                break
            yield rank, next_position[rank]
            kind, microbatch, chunk = ops[next_position[rank]]
            next_position[rank] += 1
            node = (OpKind.B if kind is OpKind.BW else kind, schedule.placement.stage_of(rank, chunk), microbatch)
            done.add(node)
            runnable.extend(blocked.pop(node, ()))
    if blocked:
        raise Deadlock(_explain(schedule, blocked, next_position))


def _first_missing(schedule: Schedule, rank: int, position: int, done: set[Node]) -> Node | None:
    """What the operation at `position` of `rank` still waits for."""
    kind, microbatch, chunk = schedule.ops[rank][position]
    placement = schedule.placement
    for needed in dependencies(placement, kind, placement.stage_of(rank, chunk), microbatch):
        if needed not in done:
            return needed
    return None


def _explain(schedule: Schedule, blocked: dict[Node, list[int]], next_position: list[int]) -> str:
    """One line with the ranks that wait for each other."""
    waits_for = {rank: node for node, ranks in blocked.items() for rank in ranks}
    steps = []
    for rank in circle({rank: schedule.placement.rank_of(node[1]) for rank, node in waits_for.items()}):
        kind, stage, microbatch = waits_for[rank]
        at = schedule.ops[rank][next_position[rank]]
        owner = schedule.placement.rank_of(stage)
        steps.append(f"rank {rank} at {at} waits for {kind}{microbatch} of stage {stage} on rank {owner}")
    return f"schedule {schedule.name} deadlocks: {'; '.join(steps)}"


def circle(waits_for: Mapping[int, int]) -> list[int]:
    """Follow ranks, each to the one that it waits for, until one of them comes round again, or waits for none."""
    rank = min(waits_for)
    path: list[int] = []
    while rank in waits_for and rank not in path:
        path.append(rank)
        rank = waits_for[rank]
    return path[path.index(rank) :] if rank in path else path
