"""Says which flags `--zero-bubble-offload auto` needs and does not support. Imports no megatron.core."""

from __future__ import annotations

from megatron.zero_bubble.mcore.compatibility.compatibility_table import refuse_with_features
from megatron.zero_bubble.mcore.compatibility.setting_rows import Feature
from megatron.zero_bubble.session.aliases import DEFAULT_WINDOW
from megatron.zero_bubble.session.job_flags import JobFlags

OFFLOAD_FLAG = "--zero-bubble-offload auto"


def plans_offload(flags: JobFlags) -> bool:
    """Whether the schedule may copy activations to the host."""
    return flags.zero_bubble_offload == "auto"


def check_offload(flags: JobFlags) -> None:
    """Raise `ValueError` if a flag that offload needs is missing, or if a flag does not work with it."""
    if not plans_offload(flags):
        return
    if flags.zero_bubble_memory_limit is None:
        raise ValueError(
            f"{OFFLOAD_FLAG} needs --zero-bubble-memory-limit: without a limit nothing has to leave the device"
        )
    if flags.zero_bubble_schedule is not None and flags.zero_bubble_schedule.startswith("file:"):
        raise ValueError(
            f"{OFFLOAD_FLAG} plans a schedule, but --zero-bubble-schedule {flags.zero_bubble_schedule} gives one: "
            "leave one of them out"
        )
    if (flags.zero_bubble_profile_iters or DEFAULT_WINDOW)[1] == 0 and flags.zero_bubble_profile_input is None:
        raise ValueError(
            f"{OFFLOAD_FLAG} needs measured copies, and --zero-bubble-profile-iters 0 0 measures none: give another "
            "START END, or --zero-bubble-profile-input FILE"
        )
    if flags.zero_bubble_microbatch_order == "planned":
        raise ValueError(
            f"{OFFLOAD_FLAG} and --zero-bubble-microbatch-order planned: leave one out, because orders are not planned "
            "for copies"
        )
    if flags.use_torch_fsdp2:
        raise ValueError(f"{OFFLOAD_FLAG}: it would copy the parameters that --use-torch-fsdp2 gathers: leave one out")
    refuse_with_features(flags, [Feature.OFFLOAD])
