"""Decides whether training ends before its last iteration: at an exit interval, at a time limit, or after a signal."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.trainer.arguments import Arguments


class ExitReasons:
    """Decides after each iteration whether training stops; all ranks make the same decision.

    As in Megatron-LM, the time limit counts from the start of the program, which makes this object first.
    """

    def __init__(self, args: Arguments) -> None:
        self._args = args
        self._started = time.monotonic()
        self._signal: signal.Signals | None = None
        self._votes: tuple[torch.Tensor, Any] | None = None
        """The votes of the ranks for each reason to stop, and the handle of the reduction that combines the votes."""

    @contextmanager
    def signals_handled(self) -> Iterator[None]:
        """With `--exit-signal-handler`, treat SIGTERM and Ctrl-C as requests to save a checkpoint and exit.

        A repeated SIGTERM has no further effect, because a cluster's scheduler and torchrun may both send a SIGTERM. A
        second Ctrl-C ends the process at once.
        """
        if not self._args.exit_signal_handler:
            yield
            return

        def request_stop(number: int, frame: object) -> None:
            self._signal = signal.Signals(number)
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_DFL)

        before = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def reason(self, iteration: int, *, waits: bool) -> str | None:
        """Return the reason to stop training after `iteration` (the same on all ranks), or None; a collective call.

        Args:
            waits: whether the decision uses the votes that all ranks cast after `iteration`; if False, the votes of the
                previous iteration decide, so that no rank waits for other ranks.
        """
        args = self._args
        if args.exit_interval and iteration % args.exit_interval == 0:
            return f"--exit-interval {args.exit_interval}"
        return self._voted(waits=waits)

    def reason_in_evaluation(self) -> str | None:
        """Return the reason to stop training before an evaluation's next iteration, or None; a collective call.

        An evaluation may last longer than the time between SIGTERM and SIGKILL, which is 30 s under torchrun and Slurm.
        The decision uses the votes that the ranks cast before the previous iteration of the evaluation, so that the
        first stages do not wait for the last stage.
        """
        return self._voted(waits=False)

    def _voted(self, *, waits: bool) -> str | None:
        """Begin a vote of all ranks; return its result if `waits` is true, else the result of the previous vote."""
        if not self._args.exit_signal_handler and self._args.exit_duration_in_mins is None:
            return None
        counts = torch.tensor([*self._reasons().values()], dtype=torch.int, device=torch.cuda.current_device())
        cast = counts, dist.all_reduce(counts, op=dist.ReduceOp.MAX, async_op=True)
        votes, self._votes = (cast, None) if waits else (self._votes, cast)
        if votes is None:
            return None
        counts, work = votes
        work.wait()
        return next((reason for reason, count in zip(self._reasons(), counts.tolist(), strict=True) if count), None)

    def _reasons(self) -> dict[str, bool]:
        """Return reason to stop training -> whether the reason holds on this rank."""
        limit, minutes = self._args.exit_duration_in_mins, (time.monotonic() - self._started) / 60.0
        return {
            "SIGTERM": self._signal == signal.SIGTERM,
            "SIGINT": self._signal == signal.SIGINT,
            f"--exit-duration-in-mins {limit}": limit is not None and minutes > limit,
        }
