"""Reads the environment of a rank: its host and device, and CUDA settings that stop or slow a pipeline."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch

from megatron.zero_bubble.runtime.variable_shapes import refuse_one_queue
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.flags import CHUNK_FLAGS, ParallelFlags, flag_name
from megatron.zero_bubble.session.job_flags import JobFlags

_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "micro_batch_size", "global_batch_size"),
)
"""Names of flags with numbers of ranks and of sequences."""


def number_in(environment: Mapping[str, str], name: str, default: int) -> int:
    """The number in the environment variable `name` of a rank, such as RANK; `default` if the variable is not set.

    Raises:
        ValueError: the variable does not contain a number.
    """
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(
            f"environment variable {name}={text}: not a number; start the ranks with torchrun, or set RANK, WORLD_SIZE "
            "and LOCAL_RANK"
        )
    return int(text)


def host_name(environment: Mapping[str, str]) -> str:
    """The name of this machine; under Slurm, the name that Slurm gives the node."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def device_of_rank(local_rank: int, num_devices: int) -> int:
    """Index of this process's device among the visible devices; 0 if Slurm shows the process only its own device."""
    return local_rank % num_devices


def check_devices(flags: ParallelFlags, environment: Mapping[str, str], num_devices: int) -> None:
    """Refuse to run more ranks on a host than the host has devices.

    Without torchrun's `LOCAL_WORLD_SIZE`, the check accepts any number of ranks, because each rank may see devices of
    its own.

    Raises:
        ValueError: torchrun started more ranks than there are devices, and no setting lets ranks share a device.
    """
    num_ranks = number_in(environment, "LOCAL_WORLD_SIZE", 0)
    shares = flags.distributed_backend == "gloo" or environment.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0"
    if num_ranks > num_devices and not shares:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        source = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        raise ValueError(
            f"torchrun --nproc-per-node {num_ranks} starts more ranks than the {num_devices} CUDA devices that they "
            f"see{source}: NCCL needs one device for each rank"
        )


def shared_cores(environment: Mapping[str, str], num_cores: int) -> str | None:
    """A note that the ranks on a host without GPUs share processor cores; None if each rank has a core of its own.

    Args:
        environment: the environment variables, with torchrun's `LOCAL_WORLD_SIZE`.
        num_cores: processor cores of the host.
    """
    num_ranks = number_in(environment, "LOCAL_WORLD_SIZE", 1)
    if num_ranks <= num_cores:
        return None
    cores = "one processor core" if num_cores == 1 else f"{num_cores} processor cores"
    return (
        f"{num_ranks} ranks share {cores}: while one rank waits, another computes, so that a schedule with fewer "
        "bubbles gains little on this machine"
    )


def check_device_found(flags: ParallelFlags, environment: Mapping[str, str], nodes: Path) -> None:
    """Refuse to train on the CPU of a host that should have a CUDA device, unless `--distributed-backend` is given.

    A rank that finds no device would use another communication backend than the other ranks, and all ranks would hang.

    Args:
        nodes: the folder of device nodes (`/dev`).

    Raises:
        ValueError: torch was built for CUDA and finds no device, although an environment variable or a file in `/dev`
            indicates a device.
    """
    if torch.cuda.is_available() or torch.version.cuda is None or flags.distributed_backend is not None:
        return
    if (reason := _sign_of_device(environment, nodes)) is not None:
        raise ValueError(
            f"torch, built for CUDA {torch.version.cuda}, finds no CUDA device on host {host_name(environment)}, where "
            f"{reason} says that there is one: see nvidia-smi; --distributed-backend gloo trains on the CPU"
        )


def _sign_of_device(environment: Mapping[str, str], nodes: Path) -> str | None:
    """The environment variable or device file that indicates a CUDA device for this process, if any."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # Slurm writes NoDevFiles if it gives the task no device.
        return None if visible.strip() in ("", "-1", "NoDevFiles") else f"CUDA_VISIBLE_DEVICES={visible}"
    for name, value in environment.items():
        if name.startswith("SLURM_GPUS") and value not in ("", "0"):
            return f"{name}={value}"
    return next((str(node) for node in sorted(nodes.glob("nvidia[0-9]*"))), None)


def check_sizes(flags: ParallelFlags) -> None:
    """Raise `ValueError` if a number of ranks, chunks, layers of a chunk or sequences is below 1."""
    for name in (*_SIZES, *CHUNK_FLAGS):
        size = getattr(flags, name, None)
        if size is not None and size < 1:
            raise ValueError(f"{flag_name(name)} must be at least 1, got {size}")


def check_num_ranks(flags: ParallelFlags, world_size: int, source: str = "torchrun --nproc-per-node") -> None:
    """Raise `ValueError` unless the number of ranks per replica divides `world_size`; the message names `source`."""
    ranks, context = flags.ranks_of_replica, flags.context_parallel_size
    if world_size % ranks:
        sizes = f"--tensor-model-parallel-size {flags.tensor_model_parallel_size}"
        sizes += f" x --pipeline-model-parallel-size {flags.pipeline_model_parallel_size}"
        sizes += f" x --context-parallel-size {context}" if context > 1 else ""
        raise ValueError(
            f"{sizes} = {ranks} ranks do not divide the {world_size} ranks of the job: "
            f"{source} must give a multiple of {ranks}"
        )


def check_batch_size(batch_size: int, micro_batch_size: int, num_replicas: int) -> None:
    """Raise `ValueError` unless a global batch of `batch_size` sequences consists of whole microbatches."""
    step = micro_batch_size * num_replicas
    if batch_size % step:
        raise ValueError(
            f"--global-batch-size {batch_size} is not a multiple of --micro-batch-size {micro_batch_size} x "
            f"{num_replicas} data-parallel replicas = {step}"
        )


def check_environment(flags: JobFlags, environment: Mapping[str, str], has_cuda: bool) -> None:
    """Refuse settings that can make messages on the device hang; messages through host memory work with every setting.

    Raises:
        ValueError: a setting can make a zero-bubble schedule hang.
    """
    if not has_cuda or flags.schedule is None or flags.zero_bubble_communicator == "host":
        return
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        raise ValueError(
            "CUDA_LAUNCH_BLOCKING=1 makes a rank wait for every receive when it is posted, which can deadlock the "
            "pipeline: unset it, or send messages through host memory with --zero-bubble-communicator host"
        )
    if flags.variable_seq_lengths:
        refuse_one_queue(torch.device("cuda"), "messages with --variable-seq-lengths", environment)
    if flags.timing_log_level > 1:
        raise ValueError(
            f"--timing-log-level {flags.timing_log_level} waits for all work of the device around every "
            "forward and backward, also for posted receives, which can deadlock the pipeline: use 1 with "
            f"--zero-bubble-schedule {flags.schedule}"
        )


def environment_warnings(flags: JobFlags, environment: Mapping[str, str], has_cuda: bool) -> list[str]:
    """One-line warnings about environment variables that slow down a pipeline."""
    if not has_cuda or flags.schedule is None or flags.zero_bubble_communicator == "host":
        return []
    warnings = []
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if connections.isdigit() and int(connections) < 8:
        advice = "Unset it, or set 8 or more"
        if flags.tensor_model_parallel_size * flags.context_parallel_size > 1:
            advice += (
                ", with tensor and context parallelism too; only Megatron-LM's own trainer demands 1 with them, on "
                "GPUs before Blackwell"
            )
        warnings.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: kernels of all streams share {connections} queue(s) of the "
            f"device, and messages between stages wait behind computation. {advice}"
        )
    if environment.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "0":
        warnings.append(
            "TORCH_NCCL_BLOCKING_WAIT=1: the process waits for each message and launches nothing meanwhile. Unset it"
        )
    return warnings


def describe_hosts(placement: Placement, pipeline_ranks: Sequence[int], hosts: Sequence[str]) -> list[str]:
    """For each host, a line that names the stages and the global ranks of the host.

    Args:
        pipeline_ranks: the pipeline rank of each global rank.
        hosts: the host name of each global rank.
    """
    lines = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        hosted = {pipeline_ranks[rank] for rank in ranks}
        stages = sorted(placement.stage_of(rank, chunk) for rank in hosted for chunk in range(placement.num_chunks))
        lines.append(f"host {host} holds stages {_ranges(stages)} on ranks {_ranges(ranks)}")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Text for ascending numbers, in which runs of consecutive numbers are shortened, as in `0-3, 7`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
