"""The bytes that ZeRO leaves on a rank, and those that replicas send, are the known formulas."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron.zero_bubble.session.model_states import Parameters, ReplicaCounts, States
from tests.checked_flags import checked

BF16 = {"--bf16": None, "--grad-reduce-in-bf16": None}
FSDP = {"--use-torch-fsdp2": None, "--untie-embeddings-and-output-weights": None, "--zero-bubble-schedule": "zb-h1"}
KEEPS, EVERY = (
    {flag: None} for flag in ("--torch-fsdp2-no-reshard-after-forward", "--zero-bubble-reduce-every-microbatch")
)
NUM_PARAMETER_PASSES = {"0": 0, "1": 1, "2": 1, "3": 6}


@pytest.mark.parametrize("replicas", [1, 2, 8, 64])
def test_the_table_that_everybody_draws(replicas):
    args = checked(BF16)
    known = [16, 4 + 12 / replicas, 2 + 14 / replicas, 16 / replicas]
    assert [States.of(args, stage).bytes_a_parameter(replicas) for stage in range(4)] == pytest.approx(known)
    assert [sum(States.of(args, stage).passes(1)) for stage in range(4)] == [2, 2, 2, 3]


@pytest.mark.parametrize(
    ("flags", "in_a_step", "passes"),
    [
        (BF16, 16, (2, 0)),
        (BF16 | {"--use-distributed-optimizer": None}, 4 + 12 / 8, (1, 1)),
        (BF16 | FSDP | KEEPS | EVERY, 2 + 16 / 8, (3, 1)),
        (BF16 | FSDP | EVERY, 16 / 8, (3, 6)),
        (BF16 | FSDP | KEEPS, 4 + 14 / 8, (1, 1)),
        (BF16 | FSDP, 2 + 14 / 8, (1, 6)),
        ({"--bf16": None} | FSDP, 4 + 14 / 8, (1, 6)),
        ({"--bf16": None} | FSDP | EVERY, 16 / 8, (3, 6)),
    ],
)
def test_the_flags_decide_what_replicas_keep_and_how_often_they_exchange_it(flags, in_a_step, passes):
    """Eight replicas, three microbatches; torch's FSDP2 keeps a shard beside parameters that stay gathered."""
    states = States.of(checked(flags))
    assert states.bytes_a_parameter(8) == in_a_step
    assert states.passes(3) == passes


def test_instances_divide_among_themselves_and_all_reduce_shards():
    flags = BF16 | {"--use-distributed-optimizer": None, "--num-distributed-optimizer-instances": "2"}
    states = States.of(checked(flags, world_size=16))
    assert states.bytes_a_parameter(8) == 4 + 12 / 4
    assert states.sent_a_parameter(8, 1) == (2 + 2) * 3 / 4 + 2 * 2 / 4 / 2


@pytest.mark.parametrize(
    ("sizes", "replicas"),
    [
        # (ranks, pipeline, tensor, context, experts, experts' tensor) -> ranks with the same (layers, experts)
        ((64, 4, 1, 1, 16, None), (16, 1)),
        ((64, 4, 4, 1, 1, 1), (4, 16)),
        ((64, 4, 4, 1, 2, None), (4, 2)),
        ((48, 2, 4, 2, 2, 3), (6, 4)),
    ],
)
def test_experts_are_divided_among_all_ranks_of_a_stage(sizes, replicas):
    world, pipeline, tensor, context, experts, of_experts = sizes
    args = Namespace(
        world_size=world,
        pipeline_model_parallel_size=pipeline,
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        data_parallel_size=world // (pipeline * tensor * context),
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=of_experts,
    )
    assert ReplicaCounts.of(args) == replicas


def test_experts_count_with_the_ranks_that_hold_the_same_experts():
    states = States.of(checked(BF16 | {"--use-distributed-optimizer": None}, world_size=16))
    few, many = ReplicaCounts(8, 1), ReplicaCounts(8, 16)
    assert states.of_rank(Parameters(10, 100), few) == 10 * (4 + 12 / 8) + 100 * 16
    assert states.of_rank(Parameters(10, 100), many) == 10 * (4 + 12 / 8) + 100 * (4 + 12 / 16)
    dense = 10 * states.sent_a_parameter(8, 1)
    assert states.sent_by_rank(Parameters(10, 100), few, 1) == dense
    assert states.sent_by_rank(Parameters(10, 100), many, 1) == dense + 100 * states.sent_a_parameter(16, 1)


def test_states_on_the_host_or_divided_by_layers_are_not_counted_as_a_rank_s_own():
    args = checked(BF16)
    offloaded = replace(args, optimizer_cpu_offload=True, optimizer_offload_fraction=0.75)
    assert States.of(offloaded).bytes_a_parameter(8) == 4 + 12 / 4
    by_layer = Namespace(**vars(args), use_layer_wise_distributed_optimizer=True)
    assert States.of(by_layer).bytes_a_parameter(8) == 4 + 12 / 8
