"""Random schedules that are valid by construction, and a slow, independent judge of lowered ones."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule

placements = st.one_of(
    st.builds(Placement, st.just("linear"), st.integers(1, 4)),
    st.builds(Placement, st.sampled_from(["interleaved", "v"]), st.integers(1, 3), st.integers(1, 3)),
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
