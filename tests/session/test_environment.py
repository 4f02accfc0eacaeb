"""What the environment says of hosts, and settings of CUDA that cost time or cannot work."""

from __future__ import annotations

import contextlib
import socket

import pytest
import torch

from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.environment import (
    check_device_found,
    check_environment,
    describe_hosts,
    device_of_rank,
    environment_warnings,
    host_name,
    number_in,
    shared_cores,
)
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.trainer.arguments import Arguments, parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check


def flags(*more: str) -> JobFlags:
    return JobFlags.of(arguments(*more))


def arguments(*more: str) -> Arguments:
    model = ["--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"]
    training = ["--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3"]
    return parse_arguments([*model, *training, "--pipeline-model-parallel-size", "4", *more])


def test_slurm_names_the_host_where_there_is_slurm():
    assert host_name({"SLURMD_NODENAME": "n7"}) == "n7"
    assert host_name({}) == socket.gethostname()


def test_more_ranks_than_cores_are_told_that_they_take_turns():
    assert shared_cores({"LOCAL_WORLD_SIZE": "2"}, 2) is None
    assert shared_cores({}, 1) is None
    line = shared_cores({"LOCAL_WORLD_SIZE": "4"}, 2)
    assert line is not None
    assert line.startswith("4 ranks share 2 processor cores: ")
    line = shared_cores({"LOCAL_WORLD_SIZE": "2"}, 1)
    assert line is not None
    assert line.startswith("2 ranks share one processor core: ")


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
    assert "8 or more, with tensor and context parallelism too" in warning
    assert "Megatron-LM's own trainer demands 1 with them, on GPUs before Blackwell" in warning


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


def test_varying_lengths_need_several_hardware_queues():
    varying = ("--zero-bubble", "--variable-seq-lengths", "--mock-data")
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with pytest.raises(ValueError, match=r"--variable-seq-lengths need .*: unset CUDA_DEVICE_MAX_CONNECTIONS"):
        check_environment(flags(*varying), one, has_cuda=True)
    check_environment(flags(*varying), {"CUDA_DEVICE_MAX_CONNECTIONS": "2"}, has_cuda=True)
    check_environment(flags(*varying), one, has_cuda=False)
    check_environment(flags(*varying, "--zero-bubble-communicator", "host"), one, has_cuda=True)


def test_timers_inside_a_step_are_refused():
    """megatron-core's timers of level 2 synchronise the device around every F and B."""
    level_2 = ("--timing-log-level", "2")
    with pytest.raises(ValueError, match=r"--timing-log-level 2 .* use 1 with --zero-bubble-schedule auto"):
        check_environment(flags("--zero-bubble", *level_2), {}, has_cuda=True)
    check_environment(flags("--zero-bubble", *level_2), {}, has_cuda=False)
    check_environment(flags(*level_2), {}, has_cuda=True)
    check_environment(flags("--zero-bubble", "--timing-log-level", "1"), {}, has_cuda=True)


@pytest.mark.parametrize(
    ("more_flags", "environment", "num_devices", "message"),
    [
        pytest.param((), {}, 1, None, id="each task of Slurm sees one device"),
        pytest.param((), {"LOCAL_WORLD_SIZE": "4"}, 4, None, id="one for each"),
        pytest.param((), {"LOCAL_WORLD_SIZE": "4"}, 8, None, id="more than enough"),
        pytest.param((), {"LOCAL_WORLD_SIZE": "4"}, 2, "--nproc-per-node 4 .* the 2 CUDA devices", id="too few"),
        pytest.param(
            *((), {"LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "5"}, 1, r"1 CUDA .*CUDA_VISIBLE_DEVICES=5\)"),
            id="one is visible",
        ),
        pytest.param(("--distributed-backend", "gloo"), {"LOCAL_WORLD_SIZE": "4"}, 1, None, id="gloo does not mind"),
        pytest.param(
            (), {"LOCAL_WORLD_SIZE": "4", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}, 1, None, id="nor does this NCCL"
        ),
    ],
)
def test_more_ranks_than_devices_are_refused(monkeypatch, more_flags, environment, num_devices, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = arguments("--mock-data", "--vocab-size", "100", *more_flags)
    environment = {"WORLD_SIZE": "4", "LOCAL_RANK": "3", "RANK": "3", **environment}
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        complete_and_check(args, environment, has_cuda=True)


def test_a_rank_takes_its_place_among_the_devices_that_it_sees():
    assert [device_of_rank(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [device_of_rank(rank, 1) for rank in range(4)] == [0, 0, 0, 0], "Slurm's --gpus-per-task 1"


@pytest.mark.parametrize(
    ("environment", "node", "sign"),
    [
        ({}, "nvidia0", "/nvidia0"),
        ({"SLURM_GPUS_ON_NODE": "8"}, None, "SLURM_GPUS_ON_NODE=8"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, None, "CUDA_VISIBLE_DEVICES=3"),
        ({}, None, None),
        ({}, "nvidiactl", None),
        ({"SLURM_GPUS": "0"}, None, None),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS": "8"}, "nvidia0", None),
    ],
)
def test_no_device_where_one_is_expected_is_refused(monkeypatch, tmp_path, environment, node, sign):
    """Such a rank would train on the CPU over gloo, and wait for others that use NCCL."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if node is not None:
        (tmp_path / node).touch()
    message = f"built for CUDA 12.8, .*{sign} says .* --distributed-backend gloo trains on the CPU"
    with pytest.raises(ValueError, match=message) if sign else contextlib.nullcontext():
        check_device_found(flags(), environment, tmp_path)


def test_a_device_is_not_missed_where_none_is_wanted(monkeypatch):
    """Nothing is refused with torch for the CPU, or where the user asks for gloo."""
    model = ("--mock-data", "--vocab-size", "100")
    environment = {"CUDA_VISIBLE_DEVICES": "0", "WORLD_SIZE": "4"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    complete_and_check(arguments(*model), environment, has_cuda=False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    complete_and_check(arguments(*model, "--distributed-backend", "gloo"), environment, has_cuda=False)
    complete_and_check(arguments(*model), {**environment, "CUDA_VISIBLE_DEVICES": "-1"}, has_cuda=False)
    complete_and_check(arguments(*model), environment, has_cuda=False, for_this_machine=False)
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=0 says"):
        complete_and_check(arguments(*model), environment, has_cuda=False)


@pytest.mark.parametrize("value", ["abc", "", "-1"])
def test_a_variable_of_a_rank_that_is_not_a_number_is_refused(value: str) -> None:
    assert number_in({"RANK": "3"}, "RANK", 0) == 3
    assert number_in({}, "RANK", 0) == 0
    with pytest.raises(ValueError, match=f"^environment variable RANK={value}: not a number; start .* torchrun"):
        number_in({"RANK": value}, "RANK", 0)
