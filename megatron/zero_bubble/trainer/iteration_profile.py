"""Profiles iterations of a training with torch's profiler, as `--profile` and its flags say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import profile, schedule, tensorboard_trace_handler

from megatron.zero_bubble.trainer.arguments import Arguments


def check_profile(args: Arguments) -> None:
    """Refuse flags of `--profile` that contradict each other.

    Raises:
        ValueError: a flag lacks another one, or the iterations or ranks do not exist.
    """
    if not args.profile:
        return
    first, last = args.profile_step_start, args.profile_step_end
    if not first < last:
        raise ValueError(f"--profile-step-end {last} must be above --profile-step-start {first}")
    if args.tensorboard_dir is None:
        raise ValueError("--profile needs --tensorboard-dir, where the trace goes")
    ranks = args.profile_ranks or []
    if any(not 0 <= rank < args.world_size for rank in ranks):
        raise ValueError(f"--profile-ranks {' '.join(map(str, ranks))}: the ranks are 0 to {args.world_size - 1}")


@contextmanager
def profiled(args: Arguments) -> Iterator[Callable[[], None]]:
    """A context around a training, with a function to call after each iteration."""
    if not (args.profile and args.rank in (args.profile_ranks or [0])):
        yield lambda: None
        return
    first, last = args.profile_step_start, args.profile_step_end
    warmup = min(first, 1)
    with profile(
        schedule=schedule(wait=first - warmup, warmup=warmup, active=last - first, repeat=1),
        on_trace_ready=tensorboard_trace_handler(str(args.tensorboard_dir)),
        record_shapes=True,
        with_stack=True,
    ) as profiler:
        yield profiler.step
