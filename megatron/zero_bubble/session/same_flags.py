"""Checks that all ranks of a job have the same zero-bubble flags."""

from __future__ import annotations

from dataclasses import fields

from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.session.flags import ZeroBubbleFlags, flag_name

_PLACES = (
    *("zero_bubble_timeline", "zero_bubble_profile_input", "zero_bubble_profile_output"),
    "zero_bubble_unit_costs_output",
)
"""Flags that name files and folders, which may have other names on other nodes."""


def check_same_flags(flags: ZeroBubbleFlags) -> None:
    """Check that all ranks have the same zero-bubble flags; a collective call of all ranks.

    Raises:
        ValueError: a flag has different values on two ranks; raised on all ranks.
    """
    names = [entry.name for entry in fields(ZeroBubbleFlags) if entry.name not in _PLACES]
    first, *others = from_all_ranks({name: getattr(flags, name) for name in names})
    for rank, other in enumerate(others, 1):
        for name in names:
            if other[name] != first[name]:
                raise ValueError(
                    f"{flag_name(name)}: rank 0 has {_words(first[name])}, rank {rank} has {_words(other[name])}: give "
                    "all ranks the same flags"
                )


def _words(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "the flag" if value else "no flag"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
