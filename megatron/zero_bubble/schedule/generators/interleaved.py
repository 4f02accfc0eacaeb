"""Interleaved 1F1B as in megatron-core, and two variants: with forward-backward pairs, and with W split from B."""

from __future__ import annotations

from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.generators.one_f_one_b import alternate
from megatron.zero_bubble.schedule.generators.zb_h1 import split_backward
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.pairs import in_pairs


def interleaved_1f1b(
    num_ranks: int, num_microbatches: int, *, num_chunks: int, group_size: int | None = None
) -> Schedule:
    """Generate interleaved 1F1B with the same order of operations as megatron-core.

    Microbatches pass through the chunks in groups: a group runs through all chunks of a rank before the next group
    starts. Rank r (from 0) runs a warmup of 2(p-r-1) + (v-1) group_size forwards, then forwards and backwards
    alternately. With groups of p microbatches the bubble is (p-1)(F+B+W)/v, and the peak memory is (1 + (p-1)/(pv)) p
    M_B. In the formulas for the bubble and the peak memory, F, B, W and M_B are the times and the memory of all chunks
    of a rank together. Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.

    Args:
        num_ranks: number of ranks p.
        num_microbatches: number of microbatches m.
        num_chunks: number of model chunks of each rank, v.
        group_size: number of microbatches of a group; by default the number of ranks.

    Raises:
        ScheduleError: there are fewer than 2 chunks, a group has fewer microbatches than there are ranks, or
            `group_size` exceeds the number of microbatches.
    """
    return _interleaved("interleaved-1f1b", num_ranks, num_microbatches, num_chunks, group_size)


def interleaved_pairs(
    num_ranks: int, num_microbatches: int, *, num_chunks: int, group_size: int | None = None
) -> Schedule:
    """Generate megatron-core's interleaved schedule with `--overlap-moe-expert-parallel-comm`.

    The warmup has one forward more than the warmup of interleaved 1F1B. In the steady state, each forward and the next
    backward of the rank run as one pair (see `schedule.pairs`). The forward and the backward of a pair belong to
    different microbatches or stages.

    Args:
        num_ranks: number of ranks p.
        num_microbatches: number of microbatches, a multiple of the group size.
        num_chunks: number of model chunks of each rank, at least 2.
        group_size: number of microbatches of a group; by default the number of ranks.

    Raises:
        ScheduleError: there are fewer than 2 chunks, the number of microbatches is not a multiple of the group size, or
            a group has fewer microbatches than there are ranks.
    """
    size = group_size or num_ranks
    if num_microbatches % size:
        raise ScheduleError(
            f"schedule interleaved-pairs needs whole groups of microbatches: {num_microbatches} are not a multiple of "
            f"{size}"
        )
    return _interleaved("interleaved-pairs", num_ranks, num_microbatches, num_chunks, group_size, has_pairs=True)


def interleaved_zb(
    num_ranks: int, num_microbatches: int, *, num_chunks: int, group_size: int | None = None
) -> Schedule:
    """Generate interleaved 1F1B with W split from B: on rank r (from 0), each W comes 2r backwards after its B.

    The warmup of interleaved 1F1B already has at least as many forwards as the warmup of ZB-H2. With W delayed as in
    ZB-H2, the bubble is (p-1)(F+B-2W)/v, or slightly more if forwards arrive late at the next chunk. No rank needs more
    memory than rank 0 of interleaved 1F1B.

    Args:
        num_ranks: number of ranks p.
        num_microbatches: number of microbatches m.
        num_chunks: number of model chunks of each rank, v.
        group_size: number of microbatches of a group; by default the number of ranks.

    Raises:
        ScheduleError: there are fewer than 2 chunks, `group_size` exceeds the number of microbatches, or a group has
            fewer microbatches than there are ranks.
    """
    fused = _interleaved("interleaved-zb", num_ranks, num_microbatches, num_chunks, group_size)
    return split_backward(fused, delay=2)


def _interleaved(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    group_size: int | None,
    *,
    has_pairs: bool = False,
) -> Schedule:
    if group_size is None:
        group_size = num_ranks
    # All interleaved schedules must meet the following conditions, with which megatron-core prevents deadlocks.
    if num_chunks < 2:
        raise ScheduleError(f"schedule {name} needs at least 2 chunks a rank, got {num_chunks}")
    if num_microbatches < num_ranks:
        raise ScheduleError(
            f"schedule {name} needs at least {num_ranks} microbatches, one for every rank, got {num_microbatches}"
        )
    if not num_ranks <= group_size <= num_microbatches:
        raise ScheduleError(
            f"schedule {name} needs microbatch groups of {num_ranks} (the ranks) to {num_microbatches} "
            f"(the microbatches), got {group_size}"
        )
    last = num_microbatches % group_size
    if 0 < last < num_ranks:
        raise ScheduleError(
            f"schedule {name}: {num_microbatches} microbatches in groups of {group_size} leave a last group of {last}, "
            f"but a group needs at least {num_ranks}, one for every rank: give {num_microbatches - last} or "
            f"{num_microbatches - last + num_ranks} microbatches"
        )
    forwards: list[Op] = []
    backwards: list[Op] = []
    for first in range(0, num_microbatches, group_size):
        group = range(first, min(first + group_size, num_microbatches))
        forwards += [Op(OpKind.F, microbatch, chunk) for chunk in range(num_chunks) for microbatch in group]
        backwards += [Op(OpKind.BW, microbatch, chunk) for chunk in reversed(range(num_chunks)) for microbatch in group]
    least = (num_chunks - 1) * group_size + has_pairs
    warmups = [2 * (num_ranks - 1 - rank) + least for rank in range(num_ranks)]
    ops = tuple(alternate(forwards, backwards, warmup) for warmup in warmups)
    schedule = Schedule(name, Placement("interleaved", num_ranks, num_chunks), num_microbatches, ops)
    if has_pairs:
        in_turn = (max(0, len(forwards) - warmup) for warmup in warmups)
        schedule = in_pairs(schedule, [frozenset(backwards[:number]) for number in in_turn])
    return schedule
