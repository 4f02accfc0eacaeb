"""Makes what runs and draws a job's plan, for the trainer and the launcher alike."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.runtime.channel_memory import ChannelCommunicator
from megatron.zero_bubble.runtime.communicator import TorchCommunicator
from megatron.zero_bubble.runtime.host_communicator import HostCommunicator
from megatron.zero_bubble.runtime.replanner import Report
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.session.flags import ZeroBubbleFlags
from megatron.zero_bubble.session.profiling import profile_window, reporter, too_short_to_profile
from megatron.zero_bubble.session.reports import channels_line, print_rank_0
from megatron.zero_bubble.session.settings import JobSettings
from megatron.zero_bubble.session.timeline_writer import TimelineWriter


def run_plan(
    job: JobSettings,
    store: WeightGradStore,
    iteration: int,
    post_validation: PostValidation | None = None,
    write_plan: Callable[[Report], None] = lambda report: None,
) -> ForwardBackward:
    """The forward-backward function that runs the job's plan, and profiles and replans as the flags say.

    Args:
        iteration: the iteration after which the job begins.
        write_plan: called on every rank with each plan from measured costs, beside what is printed of it.
    """
    assert job.plan is not None
    flags = job.flags
    if warning := too_short_to_profile(flags, iteration):
        print_rank_0(warning)
    if flags.zero_bubble_communicator == "host":
        print_rank_0(" > messages between stages go through host memory (--zero-bubble-communicator host)")
    describe_plan = reporter(flags, print_rank_0)

    def report(plan: Report) -> None:
        describe_plan(plan)
        write_plan(plan)

    return ForwardBackward(
        job.plan,
        store,
        timeout=timedelta(minutes=flags.distributed_timeout_minutes),
        planning=job.planning,
        report=report,
        post_validation=post_validation,
        communicator=communicator_of(flags),
        report_channels=lambda memory: print_rank_0(channels_line(memory)),
        pairs=flags.overlap_moe_expert_parallel_comm,
        orders_microbatches={None: None, "planned": True, "data": False}[flags.zero_bubble_microbatch_order],
    )


def communicator_of(flags: ZeroBubbleFlags) -> type[ChannelCommunicator]:
    """The class of the channels between stages."""
    return HostCommunicator if flags.zero_bubble_communicator == "host" else TorchCommunicator


def open_timeline(job: JobSettings, forward_backward: ForwardBackward, iteration: int) -> TimelineWriter | None:
    """The writer for `--zero-bubble-timeline`, or None; the job begins after iteration `iteration`."""
    flags = job.flags
    if flags.zero_bubble_timeline is None:
        return None
    window = profile_window(flags)
    after = iteration + (window[1] if window else 1)
    first, last = flags.zero_bubble_timeline_iters or (after + 1, after + 2)
    return TimelineWriter(flags.zero_bubble_timeline, first, last, iteration, forward_backward)
