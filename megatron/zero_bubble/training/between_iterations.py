"""What Megatron's flags put between a training's computations: garbage collection, profilers, freeing of GPU memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron.zero_bubble.job.flags import flag_name
from megatron.zero_bubble.training.arguments import Arguments


def check_between_iterations(args: Arguments) -> None:
    """Refuse flags of garbage collection and profiling that contradict each other.

    Raises:
        ValueError: a flag would have no effect, or lacks another one.
    """
    for name in ("manual_gc_interval", "no_manual_gc_eval"):
        if getattr(args, name) and not args.manual_gc:
            raise ValueError(f"{flag_name(name)} needs --manual-gc")
    if not args.profile:
        if args.use_pytorch_profiler:
            raise ValueError("--use-pytorch-profiler needs --profile")
        return
    first, last = args.profile_step_start, args.profile_step_end
    if not first < last:
        raise ValueError(f"--profile-step-end {last} must be above --profile-step-start {first}")
    if uses_torch_profiler(args) and args.tensorboard_dir is None:
        raise ValueError("--profile with torch's profiler needs --tensorboard-dir, where the trace goes")
    ranks = args.profile_ranks or []
    if any(not 0 <= rank < args.world_size for rank in ranks):
        raise ValueError(f"--profile-ranks {' '.join(map(str, ranks))}: the ranks are 0 to {args.world_size - 1}")


def uses_torch_profiler(args: Arguments) -> bool:
    """Whether `--profile` means torch's profiler: nsys, Megatron's default, profiles only CUDA."""
    return args.use_pytorch_profiler or not torch.cuda.is_available()


class BetweenIterations:
    """Does on one rank what the flags ask for around its iterations; with none of them it does nothing."""

    def __init__(self, args: Arguments) -> None:
        self._args = args
        self._profiles = args.profile and args.rank in (args.profile_ranks or [0])
        self._profiler: Any = None
        self._nvtx: Any = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context around the whole training."""
        with ExitStack() as resources:
            if self._args.manual_gc:
                gc.disable()
                resources.callback(gc.enable)
                gc.collect()
            resources.callback(self._stop_profiling)
            yield

    def before_iteration(self, done: int) -> None:
        """Begin to profile where that is due; `done` iterations are over."""
        if not self._profiles or done != self._args.profile_step_start:
            return
        if uses_torch_profiler(self._args):
            self._profiler = torch.profiler.profile(
                on_trace_ready=torch.profiler.tensorboard_trace_handler(str(self._args.tensorboard_dir)),
                record_shapes=True,
                with_stack=True,
            )
            self._profiler.start()
        else:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
            self._nvtx = torch.autograd.profiler.emit_nvtx(record_shapes=True)
            self._nvtx.__enter__()

    def after_backward(self) -> None:
        if self._args.empty_unused_memory_level >= 1:
            torch.cuda.empty_cache()

    def after_iteration(self, done: int) -> None:
        """Do what is due after an iteration, the `done`th."""
        args = self._args
        if args.empty_unused_memory_level >= 2:
            torch.cuda.empty_cache()
        if done == args.profile_step_end:
            self._stop_profiling()
        if args.manual_gc and args.manual_gc_interval and done % args.manual_gc_interval == 0:
            gc.collect()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """A context around an evaluation."""
        collects = self._args.manual_gc and not self._args.no_manual_gc_eval
        if collects:
            gc.collect()
        yield
        if collects:
            gc.collect(generation=0)

    def _stop_profiling(self) -> None:
        """End the profiler that runs, if one does; torch's then writes its trace."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if self._nvtx is not None:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
            self._nvtx.__exit__(None, None, None)
            self._nvtx = None
