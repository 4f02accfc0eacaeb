"""For one chunk a rank: profiles, the numbers of F that ranks run before their first B, and the orders they give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.problem import Problem

Profile = tuple[int, ...]
"""Rank -> how many microbatches it has between the start of F and the end of B."""


def alternating_orders(problem: Problem, profile: Profile) -> list[Order]:
    """Every rank runs as many F as its profile says, then B and F in turn, then the B that are left."""
    size, m = problem.num_stages, problem.num_microbatches
    return [
        [rank] * warmup + [size + rank, rank] * (m - warmup) + [size + rank] * warmup
        for rank, warmup in enumerate(profile)
    ]


def capacities(problem: Problem) -> Profile:
    """The largest profile that the limits and the number of microbatches allow, if all is dropped that can be."""
    found = []
    for limit, footprint in zip(problem.limits, problem.footprints, strict=True):
        each, once = (footprint.dropped, footprint.restored) if problem.recomputes else (footprint.whole, 0)
        fits = floor((limit - once) / each + 1e-9) if each > 0 else problem.num_microbatches
        found.append(max(1, min(fits, problem.num_microbatches)))
    return tuple(found)


def profiles(problem: Problem) -> Iterator[Profile]:
    """The profiles worth trying, the most promising first, none twice.

    A profile falls in a straight line from the first rank to the last. It is as steep as memory allows; or it
    keeps every rank with F until its first B is there, which is ZB-H2's where F = B; or it is that of ZB-H2 or
    ZB-H1; or something less steep.
    """
    caps = capacities(problem)
    seen: set[Profile] = set()
    for line in _lines(problem, caps):
        for phase in (0, 0.5, 0.99):
            least = 1 + problem.num_delayed
            profile = tuple(min(cap, least + floor(x + phase + 1e-9)) for cap, x in zip(caps, line, strict=True))
            if profile not in seen:
                seen.add(profile)
                yield profile


def sloped_caps(problem: Problem) -> Iterator[Profile]:
    """Caps for a planner without a given order, that fall from the first rank less steeply than memory allows.

    In less memory than ZB-H1's the ranks cannot take turns in strict order, but still gain if those
    down the line hold no more microbatches than they need.
    """
    caps = capacities(problem)
    turn = turns(problem)
    slope = _steepest(turn, caps)
    for factor in (0.75, 0.82, 0.88, 1):
        yield tuple(
            max(1, min(cap, floor(caps[0] - factor * slope * (turn[0] - t) + 1e-9)))
            for cap, t in zip(caps, turn, strict=True)
        )


def neighbours(problem: Problem, profile: Profile) -> Iterator[Profile]:
    """Profiles with one microbatch more or less on one rank, or on all ranks up to one."""
    caps = capacities(problem)
    for rank in range(len(profile)):
        for first in dict.fromkeys((rank, 0)):
            for change in (1, -1):
                changed = [n + change if first <= r <= rank else n for r, n in enumerate(profile)]
                if all(1 <= n <= cap for n, cap in zip(changed, caps, strict=True)):
                    yield tuple(changed)


def turns(problem: Problem) -> list[float]:
    """Rank -> least time from the end of its F to when its B is ready: through the last stage and back."""
    latency = problem.latency
    found = [0.0]
    for stage in range(problem.num_stages - 1, 0, -1):
        both = latency[stage] + latency[problem.num_stages + stage]
        found.append(found[-1] + both + 2 * problem.message[stage - 1])
    return found[::-1]


def _lines(problem: Problem, caps: Sequence[int]) -> Iterator[list[float]]:
    """Real numbers to round to profiles: rank -> microbatches beyond the first, zero on the last rank."""
    hops = [float(problem.num_ranks - 1 - rank) for rank in range(problem.num_ranks)]
    turn = turns(problem)
    f = max(problem.duration[: problem.num_stages])
    steepest = [_steepest(line, caps) for line in (hops, turn)]
    yield [x * steepest[0] for x in hops]
    yield [x / f for x in turn]
    yield [x * steepest[1] for x in turn]
    yield [x * 2 for x in hops]
    yield hops
    for sixteenths in range(1, 8):
        yield [x * steepest[0] * (1 - sixteenths / 16) for x in hops]
        yield [x * steepest[1] * (1 - sixteenths / 16) for x in turn]


def _steepest(line: Sequence[float], caps: Sequence[int]) -> float:
    """The largest factor for which the line stays within the capacities."""
    return min(((cap - 1) / x for cap, x in zip(caps, line, strict=True) if x > 0), default=0)
