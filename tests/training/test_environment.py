"""What the environment says of hosts, and settings of CUDA that cost time or cannot work."""

from __future__ import annotations

import socket

import pytest

from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.training.arguments import Arguments, parse_arguments
from megatron.zero_bubble.training.environment import (
    check_environment,
    describe_hosts,
    environment_warnings,
    host_name,
)


def flags(*more: str) -> Arguments:
    model = ["--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"]
    training = ["--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3"]
    return parse_arguments([*model, *training, "--pipeline-model-parallel-size", "4", *more])


def test_slurm_names_the_host_where_there_is_slurm():
    assert host_name({"SLURMD_NODENAME": "n7"}) == "n7"
    assert host_name({}) == socket.gethostname()


def test_each_host_names_its_stages_and_ranks():
    """Two hosts of four ranks, tensor parallel 2: the pipeline's ranks are outermost."""
    lines = describe_hosts(Placement("linear", 4), [0, 0, 1, 1, 2, 2, 3, 3], ["a"] * 4 + ["b"] * 4)
    assert lines == ["host a holds stages 0-1 on ranks 0-3", "host b holds stages 2-3 on ranks 4-7"]


def test_a_host_of_a_v_holds_both_ends():
    lines = describe_hosts(Placement("v", 4, 2), range(4), ["a", "a", "b", "c"])
    assert lines == [
        "host a holds stages 0-1, 6-7 on ranks 0-1",
        "host b holds stages 2, 5 on ranks 2",
        "host c holds stages 3-4 on ranks 3",
    ]


@pytest.mark.parametrize("connections", ["1", "7"])
def test_few_hardware_queues_are_warned_of(connections):
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    (warning,) = environment_warnings(flags("--zero-bubble"), environment, has_cuda=True)
    assert f"CUDA_DEVICE_MAX_CONNECTIONS={connections}:" in warning
    assert "8 or more" in warning
    assert "tensor parallelism" not in warning
    tensor_parallel = flags("--zero-bubble", "--tensor-model-parallel-size", "2")
    (warning,) = environment_warnings(tensor_parallel, environment, has_cuda=True)
    assert "with tensor parallelism too" in warning
    (warning,) = environment_warnings(tensor_parallel, environment, has_cuda=True, is_megatron_lm=True)
    assert "Megatron-LM demands 1 with tensor or context parallelism" in warning
    assert "Unset" not in warning


def test_blocking_waits_are_warned_of():
    (warning,) = environment_warnings(flags("--zero-bubble"), {"TORCH_NCCL_BLOCKING_WAIT": "1"}, has_cuda=True)
    assert "TORCH_NCCL_BLOCKING_WAIT" in warning


BAD = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_BLOCKING_WAIT": "1", "CUDA_LAUNCH_BLOCKING": "1"}


@pytest.mark.parametrize(
    ("args", "environment", "has_cuda"),
    [
        pytest.param(flags("--zero-bubble"), {}, True, id="nothing is set"),
        pytest.param(flags("--zero-bubble"), {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, True, id="enough queues"),
        pytest.param(flags("--zero-bubble"), BAD, False, id="no CUDA"),
        pytest.param(flags(), BAD, True, id="megatron-core's schedule"),
        pytest.param(
            flags("--zero-bubble", "--zero-bubble-communicator", "host"), BAD, True, id="no message on the GPU"
        ),
    ],
)
def test_nothing_is_said_where_nothing_is_wrong(args, environment, has_cuda):
    assert environment_warnings(args, environment, has_cuda) == []
    check_environment(args, environment, has_cuda)


def test_blocking_launches_are_refused():
    with pytest.raises(ValueError, match=r"CUDA_LAUNCH_BLOCKING=1 .* unset it"):
        check_environment(flags("--zero-bubble"), {"CUDA_LAUNCH_BLOCKING": "1"}, has_cuda=True)
