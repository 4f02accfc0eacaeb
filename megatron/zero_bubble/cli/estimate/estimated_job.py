"""Builds the job to estimate from the flags of the command and of the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.estimate.arguments import EstimateFlags
from megatron.zero_bubble.cli.estimate.cluster import Cluster, rank_parameters
from megatron.zero_bubble.cli.trainings import complete_training
from megatron.zero_bubble.job.job_flags import JobFlags
from megatron.zero_bubble.job.model_states import States
from megatron.zero_bubble.job.post_validation_flags import awaited_by_the_first_stage
from megatron.zero_bubble.schedule import Placement, ScheduleError
from megatron.zero_bubble.schedule.formats import Profile, profile_from_json
from megatron.zero_bubble.training.arguments import Arguments

PROG = "zero-bubble estimate"
_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--mock-data")
_STAND_INS = {"--train-iters": "1000000000", "--lr": "1e9"}
"""Flags that a training requires and an estimate ignores; their values are too large for other flags to exceed."""


@dataclass(frozen=True)
class EstimatedJob:
    """The training whose needs are estimated, and the cluster it would run on."""

    args: Arguments
    flags: JobFlags
    cluster: Cluster
    states: States
    profile: Profile | None
    """Measured costs; if None, costs are computed from operations and bytes."""
    num_chunks: int | None = None
    """Model chunks a rank for schedules that let the user choose; if None, the flags or the schedule decide."""
    is_quick: bool = False
    """Whether schedules are planned with little effort."""

    @property
    def num_microbatches(self) -> int:
        return self.flags.most_microbatches

    @property
    def replicas(self) -> int:
        """Number of ranks with the same parameters, which reduce gradients together and divide states by ZeRO."""
        return self.args.data_parallel_size * self.args.context_parallel_size

    def with_flags(self, changed: Mapping[str, Any]) -> EstimatedJob:
        """Return the job with other values of these flags of its training, by name."""
        return replace(self, args=replace(self.args, **changed), flags=replace(self.flags, **changed))

    def exchanged_bytes(self, placement: Placement) -> list[float]:
        """Return the bytes that each pipeline rank sends to its replicas in an iteration."""
        a_parameter = self.states.sent_a_parameter(self.replicas, self.num_microbatches)
        return [sum(parameters) * a_parameter for parameters in rank_parameters(self.args, placement)]

    def awaited(self, placement: Placement) -> str | None:
        """Return what keeps iterations from overlapping under post-validation; None if nothing does."""
        return awaited_by_the_first_stage(self.flags, placement)


def job_of(flags: EstimateFlags) -> EstimatedJob:
    """Return the job that the flags describe.

    Raises:
        ValueError: the training would refuse its flags, or it cannot be estimated.
    """
    given = _with_stand_ins(flags.training_flags)
    args, settings = complete_training(given, flags.world_size, PROG, has_cuda=True, for_this_machine=False)
    if args.pipeline_model_parallel_size < 2:
        raise ValueError("schedules need --pipeline-model-parallel-size of at least 2")
    if args.mtp_num_layers is not None:
        raise ValueError("--mtp-num-layers is not supported: the cost of its layers is not estimated; leave it out")
    cluster = Cluster(
        memory=flags.device_memory,
        reserved=flags.reserved_memory,
        flops=flags.device_tflops * 1e12 * flags.mfu,
        bandwidth=flags.interconnect_bandwidth * 1e9,
        latency=flags.interconnect_latency * 1e-6,
    )
    profile = _profile(flags.profile, settings.flags)
    return EstimatedJob(args, settings.flags, cluster, States.of(args, flags.zero_stage), profile, flags.num_chunks)


def _with_stand_ins(flags: Sequence[str]) -> list[str]:
    given = {word.split("=", 1)[0] for word in flags}
    missing = [word for name, value in _STAND_INS.items() if name not in given for word in (name, value)]
    return [*flags, *missing, *([] if given.intersection(_DATA) else ["--mock-data"])]


def _profile(path: Path | None, flags: JobFlags) -> Profile | None:
    if path is None:
        return None
    try:
        profile = profile_from_json(path.read_text(encoding="utf-8"))
        profile.check_fits(profile.placement, flags.model, flags.recompute)
    except (OSError, UnicodeDecodeError, ScheduleError) as error:
        raise ValueError(f"--profile {path}: {error}") from error
    return profile
