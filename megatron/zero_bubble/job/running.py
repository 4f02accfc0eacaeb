"""Makes what runs and draws a job's plan, for the trainer and the launcher alike."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from megatron.zero_bubble.job.flags import ZeroBubbleFlags
from megatron.zero_bubble.job.profiling import profile_window, reporter, too_short_to_profile
from megatron.zero_bubble.job.settings import JobSettings
from megatron.zero_bubble.job.start_up import print_rank_0
from megatron.zero_bubble.job.timeline_writer import TimelineWriter
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.runtime.channel_memory import ChannelCommunicator, ChannelMemory
from megatron.zero_bubble.runtime.communicator import TorchCommunicator
from megatron.zero_bubble.runtime.host_communicator import HostCommunicator
from megatron.zero_bubble.runtime.replanner import Report
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Idle


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
        report_channels=_print_channels,
    )


def communicator_of(flags: ZeroBubbleFlags) -> type[ChannelCommunicator]:
    """The class of the channels between stages."""
    return HostCommunicator if flags.zero_bubble_communicator == "host" else TorchCommunicator


def _print_channels(memory: ChannelMemory) -> None:
    """Print the device memory of the channels on a rank of one pipeline; other pipelines take as much."""
    each = memory.num_bytes / max(1, memory.num_channels)
    print_rank_0(
        f" > channels between stages: {memory.num_channels} communicators on a rank take "
        f"{memory.num_bytes / 2**20:.0f} MiB of its device, {each / 2**20:.0f} MiB each"
    )


def open_timeline(job: JobSettings, forward_backward: ForwardBackward, iteration: int) -> TimelineWriter | None:
    """The writer for `--zero-bubble-timeline`, or None; the job begins after iteration `iteration`."""
    flags = job.flags
    if flags.zero_bubble_timeline is None:
        return None
    window = profile_window(flags)
    after = iteration + (window[1] if window else 1)
    first, last = flags.zero_bubble_timeline_iters or (after + 1, after + 2)
    return TimelineWriter(flags.zero_bubble_timeline, first, last, iteration, forward_backward)


def idle_fields(measured: Idle | None, predicted: Idle | None) -> str:
    """Return the idle share of a pipeline as text that follows Megatron's fields of a log line; None is left out.

    Of the prediction only the bubble rate is there.
    """
    line = ""
    if measured is not None:
        line += f" idle: {measured.total:.2%} | imbalance: {measured.imbalance:.2%} |"
        line += f" bubble rate: {measured.bubble:.2%} |"
    return line + (f" predicted: {predicted.bubble:.2%} |" if predicted is not None else "")


def idle_scalars(measured: Idle | None, predicted: Idle | None) -> dict[str, float]:
    """Return the idle share of a pipeline under the tags of TensorBoard and Weights & Biases; None is left out."""
    scalars: dict[str, float] = {}
    if measured is not None:
        scalars |= {"idle": measured.total, "imbalance": measured.imbalance, "bubble-rate": measured.bubble}
    if predicted is not None:
        scalars |= {"predicted-idle": predicted.total, "predicted-bubble-rate": predicted.bubble}
    return scalars
