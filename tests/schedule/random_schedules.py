"""Random schedules that are valid by construction, and slow, independent judges of lowered ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule, StageCosts
from megatron.zero_bubble.schedule.kinds import COMMUNICATION, RECEIVES, SENDS

placements = st.one_of(
    st.builds(Placement, st.just("linear"), st.integers(1, 4)),
    st.builds(Placement, st.just("interleaved"), st.integers(1, 3), st.integers(1, 3)),
    st.builds(Placement, st.just("v"), st.integers(1, 3), st.integers(2, 3)),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any placement; every stage fuses or splits its backward; ops run in any order that respects dependencies."""
    placement = draw(placements)
    m = draw(st.integers(1, 4))
    random = draw(st.randoms(use_true_random=False))
    fused = [draw(st.booleans()) for _ in range(placement.num_stages)]
    last = placement.num_stages - 1
    done = {kind: [0] * placement.num_stages for kind in (OpKind.F, OpKind.B, OpKind.W)}
    ops: list[list[Op]] = [[] for _ in range(placement.num_ranks)]

    def possible() -> list[tuple[OpKind, int]]:
        f, b, w = done[OpKind.F], done[OpKind.B], done[OpKind.W]
        found = []
        for s in range(placement.num_stages):
            if f[s] < m and (s == 0 or f[s] < f[s - 1]):
                found.append((OpKind.F, s))
            if b[s] < f[s] and (s == last or b[s] < b[s + 1]):
                found.append((OpKind.B, s))
            if w[s] < b[s]:
                found.append((OpKind.W, s))
        return found

    while choices := possible():
        kind, stage = random.choice(choices)
        microbatch = done[kind][stage]
        done[kind][stage] += 1
        if fused[stage] and kind is OpKind.B:
            kind = OpKind.BW
            done[OpKind.W][stage] += 1
        ops[placement.rank_of(stage)].append(Op(kind, microbatch, placement.chunk_of(stage)))
    return Schedule("random", placement, m, tuple(map(tuple, ops)))


def runs(schedule: Schedule) -> bool:
    """Whether the lowered schedule runs to its end, with every tensor where it is needed.

    Written to be obvious and to share nothing with the library: one queue a channel, into which sends put
    the tensor's name; the k-th receive posted on a channel takes the k-th name; try all ranks until none moves.
    """
    placement = schedule.placement
    last = placement.num_stages - 1
    queues: dict[tuple[int, int], list[tuple]] = {}
    posted: dict[tuple[int, int], int] = {}
    inbox: list[dict[tuple, tuple]] = [{} for _ in schedule.ops]  # expected tensor -> (channel, index)
    tensors: list[set[tuple]] = [set() for _ in schedule.ops]
    used: set[tuple] = set()
    at = [0] * len(schedule.ops)

    def receive_done(rank: int, tensor: tuple) -> bool:
        channel, index = inbox[rank][tensor]
        sent = queues.get(channel, [])
        return index < len(sent) and sent[index] == tensor

    def step(rank: int) -> bool:
        kind, mb, chunk = schedule.ops[rank][at[rank]]
        stage = placement.stage_of(rank, chunk)
        peer = {"SEND_FORWARD": stage + 1, "RECV_BACKWARD": stage + 1, "SEND_BACKWARD": stage - 1}.get(kind, stage - 1)
        if kind.startswith(("SEND", "RECV")) and (not 0 <= peer <= last or placement.rank_of(peer) == rank):
            return False
        if kind.startswith("SEND"):
            tensor = ("activation" if kind == "SEND_FORWARD" else "gradient", mb, stage)
            if tensor not in tensors[rank]:
                return False
            queues.setdefault((rank, placement.rank_of(peer)), []).append(tensor)
            return True
        if kind.startswith("RECV"):
            tensor = ("activation" if kind == "RECV_FORWARD" else "gradient", mb, peer)
            channel = (placement.rank_of(peer), rank)
            inbox[rank][tensor] = (channel, posted.get(channel, 0))
            posted[channel] = posted.get(channel, 0) + 1
            return True
        needs = []
        if kind == "F" and stage > 0:
            needs.append(("activation", mb, stage - 1))
        if kind in ("B", "BW"):
            needs.append(("activation", mb, stage))
            if stage < last:
                needs.append(("gradient", mb, stage + 1))
        if kind == "W":
            needs.append(("to weight", mb, stage))
        for tensor in needs:
            local = placement.rank_of(tensor[2]) == rank
            if local and tensor not in tensors[rank]:
                return False
            if not local and (tensor not in inbox[rank] or not receive_done(rank, tensor)):
                return False
        made = {"F": ["activation"], "B": ["gradient", "to weight"], "BW": ["gradient", "weight"], "W": ["weight"]}
        for word in made[kind]:
            if (word, mb, stage) in tensors[rank] or (mb > 0 and (word, mb - 1, stage) not in tensors[rank]):
                return False  # twice, or not in microbatch order
            tensors[rank].add((word, mb, stage))
        used.update((rank, *tensor) for tensor in needs)
        return True

    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            while at[rank] < len(ops) and step(rank):
                at[rank] += 1
                moved = True
    finished = all(at[rank] == len(ops) for rank, ops in enumerate(schedule.ops))
    clean = all(len(sent) == posted.get(channel, 0) for channel, sent in queues.items())
    return finished and clean


EVERYBODY = -1
"""The source and the destination of a collective."""
COLLECTIVE_BEFORE = {
    OpKind.E: OpKind.TOKENS,
    OpKind.F: OpKind.EMBEDDED,
    OpKind.S: OpKind.HIDDEN,
    OpKind.L: OpKind.SOFTMAX,
    OpKind.T: OpKind.LOSS_GRAD,
    OpKind.EW: OpKind.EMBEDDED_GRAD,
}
"""What operations of vocabulary shards wait for, and the forward of the first stage."""
Launch = tuple[int, int]
"""The rank of an operation, and its position there."""


def starts_on_streams(schedule: Schedule, costs: StageCosts, *, one_queue: bool) -> dict[Launch, float]:
    """When every operation of the lowered schedule starts on NCCL's streams; those that never start are missing.

    Word for word, sharing nothing with the library: a message starts when the compute stream has reached the point
    where it was posted and its communicator's previous message is complete; it is complete when both ends have
    started and its time has passed. One queue: nothing starts before all that was launched earlier on the rank has.
    """
    placement, times = schedule.placement, costs.times
    found: dict[Launch, float] = {}
    ends = _ends_of_messages(schedule)
    channels = {launch: message for message, launches in ends.items() for launch in launches}
    first, last = placement.rank_of(0), placement.rank_of(placement.num_stages - 1)
    sources = {(OpKind.E, first), (OpKind.EW, first), (OpKind.S, last), (OpKind.T, last)}

    def stage(rank: int, op: Op) -> int:
        return placement.stage_of(rank, op.chunk)

    def complete(source: int, destination: int, number: int) -> float | None:
        """When message `number` of a channel is."""
        if number < 0:
            return 0
        before = complete(source, destination, number - 1)
        launches = ends[source, destination, number]
        num_ends = placement.num_ranks if source == EVERYBODY else 2
        if before is None or len(launches) < num_ends or any(launch not in found for launch in launches):
            return None
        if source == EVERYBODY:
            return max(before, *(found[launch] for launch in launches)) + max(costs.time_comm, default=0)
        rank, position = launches[0]
        op = schedule.ops[rank][position]
        edge = stage(rank, op) - (op.kind in (OpKind.SEND_BACKWARD, OpKind.RECV_FORWARD))
        return max(before, *(found[launch] for launch in launches)) + costs.time_comm[edge]

    def awaited(rank: int, position: int) -> Iterator[float | None]:
        op = schedule.ops[rank][position]
        for earlier, before in enumerate(schedule.ops[rank][:position]):
            if before.kind not in COMMUNICATION:
                begun = found.get((rank, earlier))
                yield None if begun is None else begun + times[before.kind][stage(rank, before)]
            if one_queue:
                yield found.get((rank, earlier))
        if op.kind in COMMUNICATION:
            source, destination, number = channels[rank, position]
            yield complete(source, destination, number - 1)
        else:
            kinds = {OpKind.F: OpKind.RECV_FORWARD, OpKind.B: OpKind.RECV_BACKWARD, OpKind.BW: OpKind.RECV_BACKWARD}
            message = op._replace(kind=kinds.get(op.kind, op.kind))
            if op.kind in COLLECTIVE_BEFORE and (stage(rank, op) == 0 or op.kind is not OpKind.F):
                message = Op(COLLECTIVE_BEFORE[op.kind], op.microbatch)
            if (op.kind, rank) in sources:
                message = op  # this rank broadcasts the result
            if message.kind in COMMUNICATION and message in schedule.ops[rank]:
                yield complete(*channels[rank, schedule.ops[rank].index(message)])

    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            for position in range(len(ops)):
                needs = [] if (rank, position) in found else list(awaited(rank, position))
                if (rank, position) not in found and None not in needs:
                    found[rank, position] = max([0, *needs])
                    moved = True
    return found


def _ends_of_messages(schedule: Schedule) -> dict[tuple[int, int, int], list[Launch]]:
    """(source, destination, number) -> its launches, the send's and the receive's, or every rank's of a collective."""
    ends: dict[tuple[int, int, int], list[Launch]] = {}
    for rank, ops in enumerate(schedule.ops):
        posted: dict[tuple[int, int], int] = {}
        for position, op in enumerate(ops):
            if op.kind in COMMUNICATION:
                channel = (EVERYBODY, EVERYBODY)
                if op.kind in SENDS | RECEIVES:
                    peer = schedule.placement.peer_of(rank, op)
                    channel = (rank, peer) if op.kind in SENDS else (peer, rank)
                posted[channel] = posted.get(channel, -1) + 1
                ends.setdefault((*channel, posted[channel]), []).append((rank, position))
    return ends


def posted_ahead(lowered: Schedule, ahead: int) -> Schedule:
    """The same with every receive `ahead` computations before its consumer, or earlier where its channel demands it."""
    ops = []
    for rank, rank_ops in enumerate(lowered.ops):
        computations = list(lowered.compute_ops(rank))
        users = {}
        for position, op in enumerate(computations):
            kind = {"F": OpKind.RECV_FORWARD, "B": OpKind.RECV_BACKWARD, "BW": OpKind.RECV_BACKWARD}.get(op.kind)
            users[op._replace(kind=kind)] = position
        latest: dict[int, int] = {}
        posted: list[list[Op]] = [[] for _ in computations]
        for receive in reversed([op for op in rank_ops if op.kind in RECEIVES]):
            source = lowered.placement.peer_of(rank, receive)
            latest[source] = max(0, min(users[receive] - ahead, latest.get(source, len(computations))))
            posted[latest[source]].insert(0, receive)
        remaining = [op for op in rank_ops if op.kind not in RECEIVES]
        here = iter(posted)
        ops.append(tuple(one for op in remaining for one in ([] if op.kind in SENDS else next(here)) + [op]))
    return replace(lowered, ops=tuple(ops))
