"""Runs a plan: what `pretrain_gpt.py` and the launcher for Megatron-LM's scripts share."""

from __future__ import annotations

from datetime import timedelta

from megatron.zero_bubble.job.profiling import planning_options, profile_window, reporter, too_short_to_profile
from megatron.zero_bubble.job.timeline_writer import TimelineWriter
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.runtime.channel_memory import ChannelMemory
from megatron.zero_bubble.runtime.communicator import TorchCommunicator
from megatron.zero_bubble.runtime.host_communicator import HostCommunicator
from megatron.zero_bubble.runtime.planning import BroadcastPlan
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule.plan import Plan
from megatron.zero_bubble.schedules import ForwardBackward
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.initialize import print_rank_0


def run_plan(
    args: Arguments, plan: Plan, store: WeightGradStore, post_validation: PostValidation | None = None
) -> ForwardBackward:
    """The forward-backward function that runs `plan`, and profiles and plans anew as the flags say."""
    if warning := too_short_to_profile(args):
        print_rank_0(warning)
    if args.zero_bubble_communicator == "host":
        print_rank_0(" > messages between stages go through host memory (--zero-bubble-communicator host)")
    return ForwardBackward(
        # All ranks run what the first one plans: a solver with a time limit may find something else on each.
        BroadcastPlan(plan),
        store,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        planning=planning_options(args, plan.placement),
        report=reporter(args, print_rank_0),
        post_validation=post_validation,
        communicator=HostCommunicator if args.zero_bubble_communicator == "host" else TorchCommunicator,
        report_channels=_print_channels,
    )


def _print_channels(memory: ChannelMemory) -> None:
    """What the channels of one pipeline take on the devices; the others' take as much."""
    each = memory.num_bytes / max(1, memory.num_channels)
    print_rank_0(
        f" > channels between stages: {memory.num_channels} communicators on a rank take "
        f"{memory.num_bytes / 2**20:.0f} MiB of its device, {each / 2**20:.0f} MiB each"
    )


def open_timeline(args: Arguments, forward_backward: ForwardBackward) -> TimelineWriter | None:
    """What draws the iterations of `--zero-bubble-timeline`; `args.iteration` is the one the job starts after."""
    if args.zero_bubble_timeline is None:
        return None
    window = profile_window(args)
    after = args.iteration + (window[1] if window else 1)
    first, last = args.zero_bubble_timeline_iters or (after + 1, after + 2)
    return TimelineWriter(args.zero_bubble_timeline, first, last, args.iteration, forward_backward)
