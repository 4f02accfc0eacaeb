"""`pretrain_gpt.py` whose last rank kills itself: its first flag is `die:WHERE@COUNT`, the COUNT-th time there."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

DIE = "die:"
PLACES = ("in the step", "between step and validation", "in a rollback")


def die_at(place: str, count: int) -> None:
    """Let the method that `place` means kill its process when it has run."""
    from megatron.core import parallel_state

    from megatron.zero_bubble.mcore.post_validation import PostValidation

    methods: dict[str, tuple[Any, str]] = {
        "in the step": (PostValidation, "_is_wrong"),
        "between step and validation": (PostValidation, "step"),
        "in a rollback": (PostValidation, "_clip_and_step"),
    }
    owner, name = methods[place]
    method, calls = getattr(owner, name), 0

    def counted(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        is_last = calls == count and parallel_state.is_pipeline_last_stage()
        result = method(self, *args)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from megatron.zero_bubble.training import __main__ as program

    program.substitute_cuda()
    program.substitute_cuda = lambda: None  # once is enough, and comes before megatron-core is imported
    place, count = sys.argv.pop(1).removeprefix(DIE).split("@")
    if place:
        die_at(place, int(count))
    sys.exit(program.main())
