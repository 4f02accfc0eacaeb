"""Colours of operations, of ranks, and of lines."""

from __future__ import annotations

from megatron.zero_bubble.schedule.kinds import KINDS, OpKind

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours of the lines of a plot, one colour for each schedule."""

_RANKS = ("#9146a8", "#4570be", "#1f968b", "#55b34c")
"""Colours of ranks, from dark to light like viridis, readable on white and on black."""


def mix(first: str, second: str, share: float) -> str:
    """Mix two colours of the form #rrggbb; `share`, from 0 to 1, is the weight of the colour `second`."""
    channels = zip(_rgb(first), _rgb(second), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in channels)


def fill_of(kind: OpKind, chunk: int, num_chunks: int) -> str:
    """The fill colour of an operation; later chunks are darker."""
    return mix(KINDS[kind].colour, "#000000", 0.5 * chunk / (num_chunks - 1) if num_chunks > 1 else 0)


def is_dark(colour: str) -> bool:
    """Whether a label on `colour` is easier to read in white (relative luminance, WCAG 2)."""
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.18


def colour_of_rank(rank: int, num_ranks: int) -> str:
    """The colour of a rank, from dark for the first rank to light for the last."""
    place = rank / max(1, num_ranks - 1) * (len(_RANKS) - 1)
    below = min(int(place), len(_RANKS) - 2)
    return mix(_RANKS[below], _RANKS[below + 1], place - below)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
