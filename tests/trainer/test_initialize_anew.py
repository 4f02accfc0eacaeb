"""Two ranks measure the same costs, and then adopt the placement that was chosen by them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.cli.trainings import complete_arguments
from megatron.zero_bubble.mcore.placement import adopt_placement
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.running import costs_of_units
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.initialize import initialized, seed_everything
from megatron.zero_bubble.trainer.layout import unit_models
from megatron.zero_bubble.trainer.model import layer_kinds
from tests.launch import TINY_GPT
from tests.ranks import be_rank, run_on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, for which megatron-core is adapted")


GPT = (*TINY_GPT, "--micro-batch-size", "2")
TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def agreed_costs(args: Arguments) -> ModelCosts:
    models = unit_models(args)
    costs = costs_of_units(JobFlags.of(args), models, layer_kinds(args), seconds=0)
    everyone = [costs] * args.world_size
    dist.all_gather_object(everyone, costs)
    assert everyone == [costs] * args.world_size
    return costs


def measure_and_adopt(rank: int, num_ranks: int, port: int) -> None:
    be_rank(rank, num_ranks)
    args = complete_arguments([*GPT, "--pipeline-model-parallel-size", "2"], num_ranks, "test", has_cuda=False)
    divided = complete_arguments([*GPT, *TENSOR_PARALLEL], num_ranks, "test", has_cuda=False)
    dist.init_process_group("gloo", store=dist.TCPStore("localhost", port), rank=rank, world_size=num_ranks)
    in_a_v, linear = Placement("v", num_ranks, 2), Placement("linear", num_ranks)
    with initialized(args, linear):
        state = torch.get_rng_state()
        whole = agreed_costs(args)
        assert whole.time_comm > 0
        adopt_placement(linear)
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
        assert parallel_state.is_rank_in_embedding_group()
        adopt_placement(in_a_v)
        seed_everything(args.seed)
        assert torch.equal(torch.get_rng_state(), state)
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 2
        assert parallel_state.is_rank_in_embedding_group() == (rank == 0), "both ends of a V are on rank 0"
        total = torch.ones(1)
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        assert total == num_ranks
    with initialized(divided, Placement("linear", 1)):
        costs = agreed_costs(divided)
        assert costs.time_comm == 0
        layer_input = args.seq_length * args.micro_batch_size * args.hidden_size * 4
        assert whole.layers[0].memory_f - whole.layers[0].memory_r == layer_input
        assert costs.layers[0].memory_f - costs.layers[0].memory_r == layer_input / 2
        assert costs.layers[0].state < whole.layers[0].state
    dist.destroy_process_group()


def test_ranks_agree_on_costs_and_adopt_a_placement():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, measure_and_adopt, (store.port,), timeout=120) == 0
