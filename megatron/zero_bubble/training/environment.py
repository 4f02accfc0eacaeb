"""What the environment of the ranks says: on which host a rank is, and settings of CUDA that pipelines cannot use."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.training.arguments import Arguments


def host_name(environment: Mapping[str, str]) -> str:
    """The name of this machine: Slurm's name of the node, where the job runs under it."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def check_environment(args: Arguments, environment: Mapping[str, str], has_cuda: bool) -> None:
    """Refuse settings of CUDA that messages on the device cannot bear; those through host memory bear them all.

    Raises:
        ValueError: a setting under which a schedule of ours cannot run.
    """
    if not has_cuda or args.schedule is None or args.zero_bubble_communicator == "host":
        return
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        raise ValueError(
            "CUDA_LAUNCH_BLOCKING=1 makes a receive that is posted ahead wait for its message, which may wait for this "
            "rank: unset it, or let messages go through host memory, --zero-bubble-communicator host"
        )


def environment_warnings(
    args: Arguments, environment: Mapping[str, str], has_cuda: bool, *, is_megatron_lm: bool = False
) -> list[str]:
    """Settings that work and cost time, one line each; `is_megatron_lm`: the script makes demands of its own."""
    if not has_cuda or args.schedule is None or args.zero_bubble_communicator == "host":
        return []
    found = []
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if connections.isdigit() and int(connections) < 8:
        parallel = args.tensor_model_parallel_size * args.context_parallel_size > 1
        if parallel and is_megatron_lm:
            advice = "Megatron-LM demands 1 with tensor or context parallelism on GPUs before Blackwell"
        else:
            advice = "Unset it, or set 8 or more" + (", with tensor parallelism too" if parallel else "")
        found.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: kernels of all streams share {connections} queue(s) of the "
            f"device, and messages between stages wait behind computation. {advice}"
        )
    if environment.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "0":
        found.append(
            "TORCH_NCCL_BLOCKING_WAIT=1: the process waits for each message, and launches nothing meanwhile. Unset it"
        )
    return found


def describe_hosts(placement: Placement, pipeline_ranks: Sequence[int], hosts: Sequence[str]) -> list[str]:
    """Which host holds which stages, one line a host, in the order of global ranks.

    Args:
        pipeline_ranks: of each global rank.
        hosts: the name of each global rank's host.
    """
    lines = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        held = {pipeline_ranks[rank] for rank in ranks}
        stages = sorted(placement.stage_of(rank, chunk) for rank in held for chunk in range(placement.num_chunks))
        lines.append(f"host {host} holds stages {_ranges(stages)} on ranks {_ranges(ranks)}")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Of ascending numbers: 0-3, 7."""
    words: list[str] = []
    first = numbers[0]
    for number, following in zip(numbers, (*numbers[1:], None), strict=True):
        if following != number + 1:
            words.append(str(first) if first == number else f"{first}-{number}")
            first = following if following is not None else first
    return ", ".join(words)
