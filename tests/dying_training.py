"""`pretrain_gpt.py` whose last rank kills itself: its first flag is `die:WHERE@COUNT`, the COUNT-th time there."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

DIE = "die:"
PLACES = ("in the step", "between step and validation", "in a rollback")


def die_at(place: str, count: int) -> None:
    """Let the method that `place` means kill its process, the first one before it does anything."""
    from megatron.core import parallel_state

    from megatron.zero_bubble.mcore.post_validation import PostValidation
    from megatron.zero_bubble.mcore.rollback import Snapshot

    methods: dict[str, tuple[Any, str]] = {
        "in the step": (Snapshot, "before_step"),
        "between step and validation": (PostValidation, "step"),
        "in a rollback": (Snapshot, "undo"),
    }
    owner, name = methods[place]
    method, calls = getattr(owner, name), 0

    def counted(self: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        is_last = calls == count and parallel_state.is_pipeline_last_stage()
        if not is_last or place != PLACES[0]:
            method(self, *args)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, counted)


if __name__ == "__main__":
    from megatron.zero_bubble.mcore.cpu import substitute_cuda

    substitute_cuda()
    place, count = sys.argv.pop(1).removeprefix(DIE).split("@")
    if place:
        die_at(place, int(count))
    runpy.run_path(str(Path(__file__).parents[1] / "pretrain_gpt.py"), run_name="__main__")
