"""Rehearsals train stages that have as many layers as the stages of the model, and leave nothing behind."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.zero_bubble.cli.trainings import complete_arguments
from megatron.zero_bubble.mcore import rehearsal
from megatron.zero_bubble.mcore.connections import Connections
from megatron.zero_bubble.mcore.decoder_models import DECODER_MODELS
from megatron.zero_bubble.mcore.rehearsal import Contender, rehearse
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.request import Layout
from megatron.zero_bubble.schedule import OpKind, Placement, Schedule, StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.trainer.initialize import initialized
from megatron.zero_bubble.trainer.layout import unit_models
from megatron.zero_bubble.trainer.model import layer_kinds
from tests.launch import TINY_GPT
from tests.ranks import be_rank, run_on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, for which megatron-core is adapted")

GPT = (*TINY_GPT, "--micro-batch-size", "2", "--pipeline-model-parallel-size", "2")
EXPERTS = (
    *("--num-experts", "2", "--moe-layer-freq", "[0]*2+[1]*2", "--disable-bias-linear", "--mtp-num-layers", "1"),
    *("--moe-aux-loss-coeff", "0.01"),
)
HYBRID = ("--hybrid-layer-pattern", "*-*-")
LINEAR, V = Placement("linear", 2), Placement("v", 2, 2)
SHARD = {"time_e": 1, "time_ew": 2, "time_s": 3, "time_t": 1, "memory_s": 1, "memory_t": -1}
STEPS, INTERLOCKED_STEPS = 1 + 2, 1 + 2 * 2
"""Steps of a contender: one to begin with, and two measurements."""


def contender(
    schedule: Schedule, costs: StageCosts, partition: Sequence[int], recompute: Recompute = Recompute.NONE
) -> Contender:
    layout = Layout(schedule.placement, tuple(partition), recompute, schedule.is_vocabulary_parallel)
    return Contender(schedule, costs, layout, interlocks=schedule.is_vocabulary_parallel)


def in_whole_layers() -> list[Contender]:
    return [
        contender(generate("1f1b", 2, 4), default_costs(LINEAR), (3, 1)),
        contender(generate("zb-v", 2, 4), default_costs(V), (1, 1, 2, 0)),
    ]


def recomputing() -> list[Contender]:
    costs = default_costs(LINEAR, Recompute.FULL)
    with_r = generate("zb-h1", 2, 4, costs=costs, recompute=Recompute.FULL)
    return [contender(schedule, costs, (3, 1), Recompute.FULL) for schedule in (generate("1f1b", 2, 4), with_r)]


def in_shards() -> list[Contender]:
    costs = default_costs(V).with_shards(V, SHARD)
    return [contender(generate("zb-v", 2, 4, costs=costs, vocabulary_parallel=True), costs, (1, 1, 1, 1))]


def num_layers_run(contender: Contender, rank: int) -> int:
    """Number of forwards of a layer in one step of a rank: in F, in R, and in a backward that recomputes."""
    placement, partition = contender.layout.placement, contender.layout.partition
    ops = contender.schedule.ops[rank]
    recomputes = {OpKind.R} if contender.schedule.recomputes else {OpKind.BW} if contender.recomputes_layers else set()
    return sum(partition[placement.stage_of(rank, op.chunk)] for op in ops if op.kind in {OpKind.F, *recomputes})


def num_models() -> int:
    gc.collect()
    return sum(issubclass(type(thing), DECODER_MODELS) for thing in gc.get_objects())


def check(
    rank: int, num_ranks: int, port: int, flags: Sequence[str], contenders: list[Contender], *, counts: bool
) -> None:
    be_rank(rank, num_ranks)
    args = complete_arguments([*GPT, *flags], num_ranks, "test", has_cuda=False)
    dist.init_process_group("gloo", store=dist.TCPStore("localhost", port), rank=rank, world_size=num_ranks)
    rehearsal._FEWEST_ROUNDS = rehearsal._MOST_ROUNDS = 2
    run, forward = Counter[str](), TransformerLayer.forward

    def counted(layer: TransformerLayer, *given: Any, **options: Any) -> Any:
        run["layers"] += 1
        return forward(layer, *given, **options)

    with initialized(args, LINEAR), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerLayer, "forward", counted)
        random_state, models, before = torch.get_rng_state(), unit_models(args), num_models()
        for each in contenders:
            run.clear()
            [time] = rehearse([each], models, layer_kinds(args), Connections, seconds=0)
            if counts:
                steps = INTERLOCKED_STEPS if each.interlocks else STEPS
                assert run["layers"] == steps * num_layers_run(each, rank), each
            everyone = [time] * num_ranks
            dist.all_gather_object(everyone, time)
            assert everyone == [time] * num_ranks
        times = rehearse(contenders, models, layer_kinds(args), Connections, seconds=0)
        assert len(times) == len(contenders)
        assert min(times) > 0
        assert torch.equal(torch.get_rng_state(), random_state)
        assert num_models() == before
        assert parallel_state.get_pipeline_model_parallel_rank() == rank
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("flags", "contenders", "counts"),
    [
        ((), in_whole_layers() + recomputing() + in_shards(), True),
        (("--bf16",), in_whole_layers() + recomputing() + in_shards(), True),
        (EXPERTS, in_whole_layers() + recomputing(), False),
        (HYBRID, in_whole_layers() + in_shards(), True),
    ],
    ids=["dense", "16 bits", "experts and multi-token prediction", "hybrid"],
)
def test_stages_of_a_rehearsal_have_the_layers_of_the_layout(flags, contenders, counts):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    run = partial(check, counts=counts)
    assert run_on_ranks(2, run, (store.port, flags, contenders), timeout=120) == 0
