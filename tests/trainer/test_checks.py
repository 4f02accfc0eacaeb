"""What flags leave open is completed from other flags, the machine and torchrun."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner.generate import generate
from megatron.zero_bubble.planner.memory_limit import MemoryLimit
from megatron.zero_bubble.schedule import OpKind, Placement
from megatron.zero_bubble.trainer.arguments import parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check
from tests.checked_flags import GOOD, checked, checked_job


def test_what_torchrun_says_is_taken_in():
    args = checked({})
    assert (args.rank, args.world_size, args.local_rank, args.data_parallel_size) == (1, 4, 1, 1)


def test_without_torchrun_there_is_one_rank():
    parsed = parse_arguments(
        [word for flag in {**GOOD, "--pipeline-model-parallel-size": "1"}.items() for word in flag if word]
    )
    args, _ = complete_and_check(parsed, {}, has_cuda=False)
    assert (args.rank, args.world_size, args.local_rank) == (0, 1, 0)


@pytest.mark.parametrize(
    ("changes", "completed"),
    [
        ({}, {"max_position_embeddings": 32, "kv_channels": 16, "ffn_hidden_size": 256, "num_query_groups": 4}),
        ({}, {"global_batch_size": 2, "tokenizer_type": "NullTokenizer", "distributed_backend": "gloo"}),
        ({"--max-position-embeddings": "64"}, {"max_position_embeddings": 64}),
        ({"--hidden-size": "1024", "--swiglu": None}, {"ffn_hidden_size": 2688}),  # 8/3 x 1024, in multiples of 64
        ({"--hidden-size": "4", "--swiglu": None}, {"ffn_hidden_size": 64}),
        ({"--ffn-hidden-size": "100", "--swiglu": None}, {"ffn_hidden_size": 100}),
        ({"--hidden-size": "66", "--kv-channels": "8"}, {"kv_channels": 8}),
        ({"--group-query-attention": None, "--num-query-groups": "2"}, {"num_query_groups": 2}),
        ({"--position-embedding-type": "rope", "--kv-channels": "5", "--rotary-percent": "0.5"}, {"kv_channels": 5}),
    ],
)
def test_defaults_that_depend_on_other_flags(changes, completed):
    args = checked(changes)
    assert {name: getattr(args, name) for name in completed} == completed


def test_the_backend_follows_the_machine():
    assert checked({}, has_cuda=True).distributed_backend == "nccl"
    assert checked({"--distributed-backend": "gloo"}, has_cuda=True).distributed_backend == "gloo"


def test_a_global_batch_is_one_microbatch_on_each_replica_unless_told_otherwise():
    assert checked({}, world_size=12).global_batch_size == 6
    assert checked({"--global-batch-size": "24"}, world_size=12).global_batch_size == 24


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_schedules_with_one_chunk_a_rank_can_be_chosen(name):
    assert checked_job({"--zero-bubble-schedule": name}).flags.schedule == name


@pytest.mark.parametrize(
    ("changes", "kind", "chunks"),
    [
        ({}, "linear", 1),
        ({"--num-virtual-stages-per-pipeline-rank": "2"}, "interleaved", 2),
        ({"--num-layers-per-virtual-pipeline-stage": "1"}, "interleaved", 2),
        ({"--num-layers-per-virtual-pipeline-stage": "2"}, "linear", 1),
        ({"--pipeline-model-parallel-layout": "Et|t|t|t|t|t|t|tL"}, "interleaved", 2),
        ({"--pipeline-model-parallel-layout": "Ett|ttt|tt|tL"}, "linear", 1),
    ],
)
def test_zero_bubble_plans_for_as_many_chunks_as_megatrons_flags_make(changes, kind, chunks):
    """By default the plan has the memory of megatron-core's own schedule with as many chunks."""
    job = checked_job({"--zero-bubble": None, "--global-batch-size": "16", **changes})
    assert job.plan.name == "auto"
    assert job.plan.placement == Placement(kind, job.plan.placement.num_ranks, chunks)
    assert job.flags.memory_limit == MemoryLimit(multiple=1.0, is_interleaved=kind == "interleaved")


@pytest.mark.parametrize("group_size", [4, 8, 12])
def test_a_plan_has_room_for_megatron_cores_order_in_groups_of_any_size(group_size):
    """With dropout the plan keeps this order, so that the same random numbers are drawn."""
    job = checked_job(
        {
            "--zero-bubble": None,
            "--global-batch-size": "32",
            "--num-virtual-stages-per-pipeline-rank": "2",
            "--microbatch-group-size-per-virtual-pipeline-stage": str(group_size),
        }
    )
    number, ranks = job.flags.most_microbatches, job.plan.placement.num_ranks
    own = generate("interleaved-1f1b", ranks, number, num_chunks=2, group_size=group_size)
    planned, expected = (
        [[op for op in ops if op.kind is OpKind.F] for ops in schedule.ops]
        for schedule in (job.plan.schedule(number).without_communication(), own)
    )
    assert planned == expected


def test_the_number_of_replicas_counts():
    assert checked({"--global-batch-size": "8"}, world_size=8).data_parallel_size == 2
    with pytest.raises(ValueError, match=r"^--global-batch-size 6 is .* x 2 data-parallel replicas = 4$"):
        checked({"--global-batch-size": "6"}, world_size=8)


@pytest.mark.parametrize(
    "changes",
    [
        {"--context-parallel-size": "2"},
        {
            "--tensor-model-parallel-size": "2",
            "--sequence-parallel": None,
            "--expert-tensor-parallel-size": "1",
        },
    ],
)
def test_context_or_tensor_ranks_may_share_experts(changes):
    experts = {"--num-experts": "4", "--expert-model-parallel-size": "2", "--disable-bias-linear": None}
    assert checked({"--pipeline-model-parallel-size": "2", **experts, **changes}).data_parallel_size == 1
