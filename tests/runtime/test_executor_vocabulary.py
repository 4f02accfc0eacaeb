"""Steps with operations on vocabulary shards: what they compute, and what becomes of their collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from shard_schedules import with_shards
from toy_pipeline import BATCH, WIDTH
from toy_vocabulary import ROWS, ShardPipeline, VocabularyProblem

from megatron.zero_bubble.planner import generate, names, placement_for
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.runtime.executor import LeftoverError
from megatron.zero_bubble.runtime.memory_meter import SavedTensorMeter
from megatron.zero_bubble.runtime.profiler import Profiler, combine_costs
from megatron.zero_bubble.runtime.recorder import HostClock, OpRecorder
from megatron.zero_bubble.schedule import Op, OpKind, Schedule, StageCosts, lower, validate
from megatron.zero_bubble.schedule.kinds import COLLECTIVES
from megatron.zero_bubble.schedule.step_ops import before_validation, with_post_validation

NUM_MICROBATCHES = 4


def lowered(schedule: Schedule) -> Schedule:
    schedule = lower(schedule)
    validate(schedule)
    return schedule


def run(schedule: Schedule, num_steps: int = 1) -> VocabularyProblem:
    pipeline = ShardPipeline(schedule)
    for _ in range(num_steps):
        pipeline.run()
    pipeline.close()
    for stage in pipeline.stages:
        assert stage.states == {}
    return pipeline.problem


def assert_close(ours: VocabularyProblem, reference: VocabularyProblem) -> None:
    """Assert that losses and gradients differ by rounding alone."""
    for microbatch, loss in reference.losses.items():
        torch.testing.assert_close(ours.losses[microbatch], loss, rtol=1e-12, atol=1e-12)
    for gradient, expected in zip(ours.gradients(), reference.gradients(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def assert_equal(ours: VocabularyProblem, reference: VocabularyProblem) -> None:
    """Assert that losses and gradients are equal, bit for bit."""
    assert ours.losses == reference.losses
    for gradient, expected in zip(ours.gradients(), reference.gradients(), strict=True):
        assert torch.equal(gradient, expected)


MODELS = sorted({(p, placement_for(name, p).num_stages) for name in names() for p in (1, 2, 4)})
"""Numbers of ranks and stages."""


def schedules_of(num_ranks: int, num_stages: int) -> Iterator[Schedule]:
    """Yield the schedules of the registry for a model: as planned on shards, and with shards at random places."""
    for seed, name in enumerate(names()):
        if ENTRIES[name].has_pairs:
            continue  # shards come between the operations of its pairs, which then are none
        if placement_for(name, num_ranks).num_stages == num_stages:
            yield generate(name, num_ranks, NUM_MICROBATCHES, vocabulary_parallel=True)
            yield with_shards(generate(name, num_ranks, NUM_MICROBATCHES), seed)


@pytest.mark.parametrize(("num_ranks", "num_stages"), MODELS)
def test_every_schedule_computes_what_autograd_does_on_the_whole_vocabulary(num_ranks, num_stages):
    reference = VocabularyProblem(num_ranks, num_stages, NUM_MICROBATCHES)
    for _ in range(2):
        reference.run_by_autograd()
    first, *others = (run(lowered(schedule), 2) for schedule in schedules_of(num_ranks, num_stages))
    assert_close(first, reference)
    for ours in others:
        assert_equal(ours, first)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_evaluation_runs_on_shards_and_keeps_no_softmax(name):
    schedule = lowered(with_shards(generate(name, 2, NUM_MICROBATCHES).forward_only(), 0))
    pipeline = ShardPipeline(schedule)
    reference = VocabularyProblem(2, schedule.num_stages, NUM_MICROBATCHES)
    pipeline.run()
    reference.run_by_autograd()
    for microbatch, loss in reference.losses.items():
        torch.testing.assert_close(pipeline.problem.losses[microbatch], loss, rtol=1e-12, atol=1e-12)
    assert all(state.softmax is None for stage in pipeline.stages for state in stage.states.values())


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_step_that_was_wrong_has_its_collectives_run_again(name):
    costs = StageCosts.uniform(generate(name, 3, 6).num_stages)
    shards = with_shards(generate(name, 3, 6), 3)
    schedule = lowered(with_post_validation(shards, costs))
    *_, last = (op for op in before_validation(schedule, 1) if op.kind in COLLECTIVES)
    pipeline = ShardPipeline(schedule)
    for stage in pipeline.stages:
        stage.verdicts = [True, False]
    slow = pipeline.stages[1]
    exchange = slow.exchange

    def exchange_slowly(op: Op) -> None:
        started.append(op)
        time.sleep(0.1 * (op == last))
        exchange(op)
        ended.append(op)

    def restart() -> None:
        assert started == ended, "what is dropped is complete"
        restarted.append(len(ended))
        slow.states.clear()

    started, ended, restarted = [], [], []
    slow.exchange, slow.restart = exchange_slowly, restart
    for _ in range(2):
        pipeline.run()
    assert ended[: restarted[0]] == ended[restarted[0] :][: restarted[0]]
    assert_equal(pipeline.problem, run(lowered(shards), 2))


def test_times_and_memory_of_a_shard_are_measured_on_its_rank():
    schedule = lowered(with_shards(generate("zb-v", 2, NUM_MICROBATCHES), 4))
    pipeline = ShardPipeline(schedule)
    meters = [
        SavedTensorMeter(store, stage.kept_bytes) for store, stage in zip(pipeline.stores, pipeline.stages, strict=True)
    ]
    recorders = [OpRecorder(HostClock(), meter) for meter in meters]
    pipeline.run(recorders)
    pipeline.close()
    profilers = [Profiler(schedule.placement, rank) for rank in range(2)]
    for profiler, recorder in zip(profilers, recorders, strict=True):
        profiler.add(recorder.take())
    costs = combine_costs(schedule.placement, [(profiler.costs(), {}) for profiler in profilers]).costs
    for name in ("time_e", "time_ew", "time_s", "time_t"):
        assert [time > 0 for time in getattr(costs, name)] == [True, True, False, False], "shards are of first chunks"
    kept = 8 * BATCH * (ROWS + WIDTH)
    assert (costs.memory_s, costs.memory_t) == ((kept, kept, 0, 0), (-kept, -kept, 0, 0))
    assert min(costs.memory_f) > 0, "what autograd saves is measured as without shards"


def on_two_ranks() -> Schedule:
    return lowered(with_shards(generate("zb-h1", 2, NUM_MICROBATCHES), 1))


def test_a_collective_whose_result_is_not_used_is_an_error():
    schedule = on_two_ranks()
    ops = tuple(op for op in schedule.ops[0] if op != Op(OpKind.T, 2))
    pipeline = ShardPipeline(replace(schedule, ops=(ops, schedule.ops[1])))
    with pytest.raises(LeftoverError, match=r"at the end of a step the result of LOSS_GRAD2 was not used\. rank 0: "):
        pipeline.run()


def failing_at(pipeline: ShardPipeline, rank: int, op: Op) -> None:
    stage = pipeline.stages[rank]
    exchange = stage.exchange

    def exchange_that_fails(asked: Op) -> None:
        if asked == op:
            raise ValueError("microbatches of several lengths")
        exchange(asked)

    stage.exchange = exchange_that_fails


@pytest.mark.parametrize("op", [Op(OpKind.TOKENS, 0), Op(OpKind.SOFTMAX, 1), Op(OpKind.HIDDEN, 2)], ids=str)
def test_an_error_in_a_collective_ends_the_step_of_all_ranks_and_keeps_its_message(op, caplog):
    pipeline = ShardPipeline(lowered(with_shards(generate("zb-v", 3, NUM_MICROBATCHES), 2)))
    failing_at(pipeline, 1, op)
    started = time.monotonic()
    errors = pipeline.run_ranks()
    assert time.monotonic() - started < 10
    assert str(errors[1]) == "microbatches of several lengths"
    assert "a collective of the vocabulary shards failed: ValueError: microbatches of several lengths" in caplog.text
    assert all(isinstance(errors[rank], ConnectionError) for rank in (0, 2))


def test_an_error_in_a_collective_is_raised_where_the_rank_waits_for_a_message_of_a_rank_that_ends_of_it():
    schedule = lowered(with_shards(generate("1f1b", 2, 1), 1))
    receive, user = (schedule.ops[0].index(op) for op in (Op(OpKind.BW, 0), Op(OpKind.T, 0)))
    assert receive < user, "rank 0 waits for a message before it waits for a collective"
    pipeline = ShardPipeline(schedule)
    failing_at(pipeline, 0, Op(OpKind.SOFTMAX, 0))
    error, _ = pipeline.run_ranks()
    assert str(error) == "microbatches of several lengths"
    assert isinstance(error.__cause__, ConnectionError)


def test_an_error_in_a_computation_is_not_replaced_by_that_of_a_collective():
    pipeline = ShardPipeline(on_two_ranks(), timeout=1.0)

    def loss(microbatch, state):
        raise ValueError("a loss of the user's")

    pipeline.stages[1].loss = loss
    errors = pipeline.run_ranks()
    assert str(errors[1]) == "a loss of the user's"
    assert all(thread.daemon for thread in threading.enumerate() if "exchanges" in thread.name), "the rank can exit"


def test_a_rank_that_waits_for_a_collective_stands_before_the_operation_that_uses_it():
    schedule, hang = on_two_ranks(), threading.Event()
    pipeline = ShardPipeline(schedule)
    exchange = pipeline.stages[0].exchange

    def exchange_that_hangs(op: Op) -> None:
        if op == Op(OpKind.SOFTMAX, 0):
            assert hang.wait(20)
        exchange(op)

    pipeline.stages[0].exchange = exchange_that_hangs
    step = threading.Thread(target=pipeline.run)
    step.start()
    at = (schedule.ops[1].index(Op(OpKind.L, 0)), False)
    deadline = time.monotonic() + 10
    while pipeline.executors[1].position() != at and time.monotonic() < deadline:
        time.sleep(0.01)
    position = pipeline.executors[1].position()
    hang.set()
    step.join()
    assert position == at
