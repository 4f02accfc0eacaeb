"""An operation as a word, `B3.1`, and back."""

from __future__ import annotations

import re

from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Op, OpKind

_WORD = re.compile(r"([A-Z_]+)(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)
_KINDS = {kind.value: kind for kind in OpKind}


def parse_op(word: str) -> Op:
    """The operation that prints as `word`. Raises `ScheduleError` if there is none."""
    match = _WORD.fullmatch(word)
    kind = _KINDS.get(match[1]) if match else None
    if match is None or kind is None:
        raise ScheduleError(f"{word!r} is no operation: expected a kind ({', '.join(_KINDS)}), a microbatch, as in F3")
    return Op(kind, int(match[2]), int(match[3] or 0))
