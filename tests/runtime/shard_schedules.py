"""Schedules of a toy pipeline with operations on vocabulary shards, at places that a seed draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from megatron.zero_bubble.schedule import Op, OpKind, Schedule
from megatron.zero_bubble.schedule.graph import Node, dependencies, nodes_of


def with_shards(schedule: Schedule, seed: int) -> Schedule:
    """Insert the operations on vocabulary shards at places that a seed draws among those that work.

    Operations run one by one, on a rank that the seed draws: the next of the schedule or the next one on the shard.
    """
    choices, placement = random.Random(seed), schedule.placement
    trains = any(op.kind in (OpKind.B, OpKind.BW) for ops in schedule.ops for op in ops)
    kinds = [OpKind.E, OpKind.S, *([OpKind.T, OpKind.EW] if trains else [])]
    last_rank = placement.rank_of(placement.num_stages - 1)
    queues: list[list[list[Op]]] = []
    for rank, ops in enumerate(schedule.ops):
        here = [*kinds, OpKind.L] if rank == last_rank else kinds
        queues.append([list(ops), *([Op(kind, m) for m in range(schedule.num_microbatches)] for kind in here)])
    whole = replace(schedule, ops=tuple(tuple(op for queue in own for op in queue) for own in queues))
    made: set[Node] = set()
    ranks: list[list[Op]] = [[] for _ in queues]
    while any(queue for own in queues for queue in own):
        ready = list(_ready(whole, queues, made))
        rank, queue = choices.choice(ready)
        op = queue.pop(0)
        made.update(nodes_of(placement, rank, op))
        ranks[rank].append(op)
    return replace(whole, name=f"{schedule.name} on shards, seed {seed}", ops=tuple(map(tuple, ranks)))


def _ready(whole: Schedule, queues: list[list[list[Op]]], made: set[Node]) -> Iterator[tuple[int, list[Op]]]:
    for rank, own in enumerate(queues):
        for queue in own:
            if queue and made.issuperset(dependencies(whole, rank, queue[0])):
                yield rank, queue
