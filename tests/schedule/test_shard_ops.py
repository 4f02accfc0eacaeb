"""Schedules whose embedding and output layer are spread over all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import generate, names
from megatron.zero_bubble.planner.registry import ENTRIES, placement_for
from megatron.zero_bubble.planner.request import QUICK_EFFORT
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import (
    Infeasible,
    InvalidSchedule,
    Op,
    OpKind,
    Placement,
    ScheduleError,
    StageCosts,
    simulate,
    validate,
)
from megatron.zero_bubble.schedule.kinds import VOCABULARY
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.shard_ops import with_vocabulary
from tests.planner.planning import LITTLE

QUICK = [name for name in names() if not ENTRIES[name].is_slow and not ENTRIES[name].has_pairs]


def model_costs(placement: Placement, num_layers: int, output: float, message: float = 0.05) -> StageCosts:
    """The costs of an even split of layers with F = B = 1 and W = 0.8, whose output layer takes `output` layers."""
    layers, part = num_layers / placement.num_stages, 1 / placement.num_chunks
    costs = StageCosts.uniform(placement.num_stages, layers, layers, 0.8 * layers, message, part, -part / 2, -part / 2)
    share = output / placement.num_ranks
    shard = {"time_e": 0.01, "time_ew": 0.01, "time_s": 2 * share, "time_t": share, "memory_s": 0.1, "memory_t": -0.1}
    return costs.with_shards(placement, shard)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 8), pytest.param(5, 15, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", QUICK)
def test_every_schedule_can_spread_the_vocabulary(name, num_ranks, num_microbatches):
    schedule = generate(name, num_ranks, num_microbatches, vocabulary_parallel=True, effort=LITTLE)
    validate(schedule)
    for rank, ops in enumerate(schedule.ops):
        kinds = {OpKind.E, OpKind.S, OpKind.T, OpKind.EW}
        if rank == schedule.placement.rank_of(schedule.num_stages - 1):
            kinds.add(OpKind.L)
        assert {op for op in ops if op.kind in VOCABULARY} == {
            Op(kind, microbatch) for kind in kinds for microbatch in range(num_microbatches)
        }
    rest = schedule.without(VOCABULARY)
    validate(rest)
    assert rest.op_sets == generate(name, num_ranks, num_microbatches, effort=LITTLE).without(VOCABULARY).op_sets


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.PLANNED])
def test_a_schedule_can_recompute_and_spread_the_vocabulary(recompute):
    placement = Placement("linear", 4)
    costs = replace(model_costs(placement, 16, 2), time_r=(4,) * 4, memory_r=(0.9,) * 4)
    options = {"recompute": recompute, "vocabulary_parallel": True, "effort": LITTLE}
    schedule = generate("auto", 4, 8, costs=costs, memory_limit=3, **options)
    validate(schedule)
    assert schedule.recomputes
    assert max(peak_memory(schedule, costs)) <= 3 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("num_layers", "output", "best_split", "linear", "in_v"),
    [
        pytest.param(32, 2, 490, 1.14, 1.2, id="8B, 128k"),
        # Further models, at 7 seconds each.
        pytest.param(32, 5.7, 580, 1.22, 1.27, id="3072 wide, 256k", marks=pytest.mark.exhaustive),
        pytest.param(80, 1.12, 1046, 0.99, 1.08, id="70B, 128k", marks=pytest.mark.exhaustive),
    ],
)
def test_spread_vocabularies_beat_the_best_split_of_whole_layers(num_layers, output, best_split, linear, in_v):
    """Eight ranks, 32 microbatches, about 1F1B's memory. `best_split` is what `auto` takes for the best split."""
    for kind, num_chunks, gain in (("linear", 1, linear), ("v", 2, in_v)):
        placement = Placement(kind, 8, num_chunks)
        costs = replace(model_costs(placement, num_layers, output), memory_s=(), memory_t=())
        schedule = generate(
            "auto",
            8,
            32,
            costs=costs,
            memory_limit=9,
            placement_kind=kind,
            num_chunks=num_chunks,
            vocabulary_parallel=True,
            effort=QUICK_EFFORT,
        )
        assert best_split / simulate(schedule, costs).cost > gain


def test_the_delay_of_one_microbatch_keeps_the_rhythm_of_1f1b():
    """With one collective barrier 1F1B holds one microbatch more, p - r + 1 on rank r."""
    placement = Placement("linear", 4)
    costs = model_costs(placement, 4, 1, message=0)
    [schedule] = with_vocabulary(generate("1f1b", 4, 12), costs, [4])
    validate(schedule)
    first_backward = [
        next(k for k, op in enumerate(schedule.without(VOCABULARY).ops[rank]) if op.kind is OpKind.BW)
        for rank in range(4)
    ]
    assert first_backward == [5, 4, 3, 2]


def test_a_limit_is_kept_with_what_the_shards_hold():
    placement = placement_for("zb-v", 4)
    costs = model_costs(placement, 16, 2)
    for limit in (3.5, 4.5, 6):
        schedule = generate("zb-v", 4, 12, costs=costs, memory_limit=limit, vocabulary_parallel=True, effort=LITTLE)
        assert max(peak_memory(schedule, costs)) <= limit * (1 + 1e-9)
    with pytest.raises(Infeasible) as error:
        generate(
            "1f1b", 4, 12, costs=model_costs(Placement("linear", 4), 16, 2), memory_limit=2, vocabulary_parallel=True
        )
    enough = error.value.smallest_limit
    generate(
        "1f1b", 4, 12, costs=model_costs(Placement("linear", 4), 16, 2), memory_limit=enough, vocabulary_parallel=True
    )


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (Op(OpKind.S, 3), "rank 1 lacks S3"),
        (Op(OpKind.T, 0), "rank 1 lacks T0"),
        (Op(OpKind.E, 7), "rank 1 lacks E7"),
    ],
    ids=str,
)
def test_a_schedule_without_an_operation_on_a_shard_is_refused(drop, message):
    schedule = generate("zb-h1", 4, 8, vocabulary_parallel=True)
    ops = list(schedule.ops)
    ops[1] = tuple(op for op in ops[1] if op != drop)
    with pytest.raises(InvalidSchedule, match=message):
        validate(replace(schedule, ops=tuple(ops)))


def test_a_loss_on_another_rank_is_refused():
    schedule = generate("zb-h1", 4, 8, vocabulary_parallel=True)
    ops = list(schedule.ops)
    ops[0] = (*ops[0], Op(OpKind.L, 0))
    with pytest.raises(InvalidSchedule, match="rank 0 runs L0, which belongs to another rank or chunk"):
        validate(replace(schedule, ops=tuple(ops)))


def test_an_evaluation_runs_forwards_softmaxes_and_losses():
    schedule = generate("zb-h1", 4, 8, vocabulary_parallel=True).forward_only()
    validate(schedule)
    assert schedule.kinds == {OpKind.E, OpKind.F, OpKind.S, OpKind.L}


def test_a_given_schedule_is_for_a_model_with_or_without_shards():
    sharded = generate("zb-h1", 4, 8, vocabulary_parallel=True)
    with pytest.raises(ScheduleError, match="has operations on vocabulary shards, but the model is not vocabulary par"):
        RunSchedules.of(sharded).schedule(8)
    with pytest.raises(ScheduleError, match="has no operations on vocabulary shards, but the model is vocabulary par"):
        RunSchedules.of(generate("zb-h1", 4, 8)).requesting(vocabulary_parallel=True).schedule(8)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "auto"])
def test_a_recomputation_that_takes_no_time_comes_before_its_backward(name):
    costs = replace(model_costs(Placement("linear", 4), 16, 2), memory_r=(0.9,) * 4)
    schedule = generate(name, 4, 8, costs=costs, recompute=Recompute.FULL, vocabulary_parallel=True, effort=LITTLE)
    validate(schedule)
