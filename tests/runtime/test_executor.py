from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from toy_pipeline import BATCH, LAYERS, WIDTH, Problem, ToyStage, num_live_activations, on_threads, over_nccl

from megatron.zero_bubble.planner import generate, names
from megatron.zero_bubble.runtime.executor import Executor, LeftoverError
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import OpRecorder
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule, StageCosts, lower, simulate, validate
from megatron.zero_bubble.schedule.tail import reorder_tail, run_together
from tests.runtime.in_memory import InMemoryNetwork


def chunk_after_chunk(placement: Placement, num_microbatches: int, *backwards: OpKind) -> Schedule:
    """All forwards of one chunk, then of the next, and back: the simplest schedule of any placement."""
    microbatches = range(num_microbatches)
    order = [Op(OpKind.F, m, chunk) for chunk in range(placement.num_chunks) for m in microbatches]
    for kind in backwards:
        order += [Op(kind, m, chunk) for chunk in reversed(range(placement.num_chunks)) for m in microbatches]
    return Schedule(f"{placement.kind} by chunks", placement, num_microbatches, (tuple(order),) * placement.num_ranks)


def schedules() -> list[Schedule]:
    """Every schedule of the registry at several sizes, and placements for which it may have none."""
    found = [generate(name, p, m) for name in names() for p, m in ((1, 2), (2, 4), (3, 6), (4, 8))]
    for p in (1, 2, 3):
        for placement in (Placement("v", p, 2), Placement("v", p, 3), Placement("interleaved", p, 3)):
            found.append(chunk_after_chunk(placement, 3, OpKind.BW))
            found.append(chunk_after_chunk(placement, 3, OpKind.B, OpKind.W))
    return found


def name_of(schedule: Schedule) -> str:
    chunks = f" v={schedule.num_chunks}" if schedule.num_chunks > 1 else ""
    split = " split" if schedule.splits_backward else ""
    return f"{schedule.name}{split} p={schedule.num_ranks}{chunks}"


def assert_equal(ours: Problem, reference: Problem) -> None:
    """Assert that losses and gradients are equal, bit for bit."""
    assert ours.losses.keys() == reference.losses.keys()
    assert all(torch.equal(ours.losses[m], reference.losses[m]) for m in reference.losses)
    for gradient, expected in zip(ours.gradients(), reference.gradients(), strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", schedules(), ids=name_of)
def test_every_schedule_computes_what_autograd_does(schedule, seed):
    schedule = lower(schedule)
    validate(schedule)
    reference = Problem(schedule.num_stages, schedule.num_microbatches)
    pipeline = over_nccl(schedule, seed)
    for _ in range(2):  # the executor is used step after step
        pipeline.run()
        reference.run_by_autograd()
        assert_equal(pipeline.problem, reference)


@pytest.mark.parametrize("schedule", schedules(), ids=name_of)
def test_operations_run_in_the_order_of_the_schedule_and_hold_the_memory_it_says(schedule):
    pipeline = on_threads(lower(schedule))
    pipeline.run()
    costs = StageCosts.uniform(schedule.num_stages, memory_f=1, memory_b=-1, memory_w=0)
    expected_peaks = simulate(schedule, costs).peak_memory
    for rank, stage in enumerate(pipeline.stages):
        assert tuple(stage.ran) == schedule.ops[rank]
        assert max(stage.live) == expected_peaks[rank]
        last = schedule.num_stages - 1
        assert stage.released == schedule.num_microbatches * sum(held < last for held in stage.stages)
        assert num_live_activations(pipeline.executors[rank]) == 0


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "interleaved-zb", "zb-v"])
def test_the_tail_runs_parameter_by_parameter_and_computes_the_same(name):
    schedule = reorder_tail(lower(generate(name, 3, 6)))
    reference = Problem(schedule.num_stages, 6)
    reference.run_by_autograd()
    pipeline = over_nccl(schedule, tail_by_parameter=True)
    pipeline.run()
    assert_equal(pipeline.problem, reference)
    for stage, ops in zip(pipeline.stages, schedule.ops, strict=True):
        last_b = max(k for k, op in enumerate(ops) if op.kind is OpKind.B)
        groups = [group for group in run_together(ops[last_b + 1 :]) if group[0].kind is OpKind.W]
        expected = [op for group in groups for _ in range(LAYERS if len(group) > 1 else 1) for op in group]
        assert stage.ran[-len(expected) :] == expected, "DDP is told each time which microbatch is next"
    assert max(len(group) for ops in schedule.ops for group in run_together(ops)) > 1


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-zb"])
def test_evaluation_runs_forwards_alone_and_keeps_nothing(name):
    schedule = lower(generate(name, 3, 6).forward_only())
    validate(schedule)
    reference = Problem(schedule.num_stages, 6)
    reference.run_by_autograd()
    pipeline = over_nccl(schedule)
    pipeline.run()
    assert pipeline.problem.losses == reference.losses
    assert pipeline.problem.gradients() == [None] * len(reference.gradients())
    for executor, stage in zip(pipeline.executors, pipeline.stages, strict=True):
        assert (num_live_activations(executor), stage.released) == (0, 0)
        assert True not in stage.inputs_need_gradients
        assert all(output() is None for output in stage.outputs.values())


def without(schedule: Schedule, rank: int, *dropped: Op) -> Schedule:
    ops = list(schedule.ops)
    assert set(dropped) <= set(ops[rank])
    ops[rank] = tuple(op for op in ops[rank] if op not in dropped)
    return replace(schedule, ops=tuple(ops))


B3, W3 = Op(OpKind.B, 3), Op(OpKind.W, 3)


@pytest.mark.parametrize(
    ("rank", "dropped", "what_is_left"),
    [
        (1, [W3], ["W3 of chunk 0 is pending"]),
        (
            0,
            [B3, W3],
            ["activations of F3 of chunk 0 are alive", "a message of microbatch 3, chunk 0 was received, not used"],
        ),
    ],
)
def test_a_step_that_leaves_something_is_an_error(rank, dropped, what_is_left):
    schedule = without(lower(generate("zb-h1", 2, 4)), rank, *dropped)
    pipeline = on_threads(schedule)
    with pytest.raises(LeftoverError) as error:
        pipeline.run()
    message = str(error.value)
    assert message.startswith(f"zb-h1: at the end of a step {'; '.join(what_is_left)}. rank {rank}: ... ")
    assert message.endswith(f" [{schedule.ops[rank][-1]}]"), "the end of the rank's operations is shown"


def test_a_result_that_is_not_sent_is_an_error():
    schedule = without(lower(generate("1f1b", 2, 1)), 1, Op(OpKind.SEND_BACKWARD, 0))
    pipeline = on_threads(schedule)
    pipeline.network.put(0, 1, torch.ones(BATCH, WIDTH))
    with pytest.raises(LeftoverError, match="a message of microbatch 0, chunk 0 was computed, not sent"):
        pipeline.executors[1].run(pipeline.stages[1])


class Late:
    """A send that is done once the test says so."""

    def __init__(self) -> None:
        self.done = self.waited = False

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.waited = True


class LateCommunicator:
    """Delivers at once, but calls a send done only once `finished` says so."""

    def __init__(self, network: InMemoryNetwork, rank: int) -> None:
        self.inner = network.communicator(rank)
        self.sends: list[Late] = []

    def send(self, tensor, destination):
        self.inner.send(tensor, destination)
        self.sends.append(Late())
        if len(self.sends) == 2:  # from here on the first two are done, and nobody needs to wait for them
            self.sends[0].done = self.sends[1].done = True
        return self.sends[-1]

    def receive(self, source, spec):
        return self.inner.receive(source, spec)


def test_a_step_waits_for_the_sends_that_have_not_finished_and_for_no_other():
    network = InMemoryNetwork(2)
    late = LateCommunicator(network, 0)
    schedule = lower(generate("gpipe", 2, 4).forward_only())
    Executor(schedule, 0, late, WeightGradStore()).run(ToyStage(Problem(2, 4), schedule, 0, WeightGradStore()))
    assert [send.waited for send in late.sends] == [False, False, True, True]


def test_operations_are_profiler_ranges_with_the_names_of_the_schedule():
    schedule = lower(generate("zb-h1", 1, 2))
    pipeline = on_threads(schedule)
    with torch.profiler.profile() as profiler:
        pipeline.executors[0].run(pipeline.stages[0])
    words = [str(op) for op in schedule.ops[0]]
    ranges = [event for event in profiler.events() if event.name in words]
    assert [event.name for event in sorted(ranges, key=lambda event: event.time_range.start)] == words


@pytest.mark.parametrize("is_profiled", [False, True])
def test_on_a_gpu_operations_are_ranges_of_nvtx_unless_torchs_profiler_has_its_own(monkeypatch, is_profiled):
    schedule, ranges = lower(generate("zb-h1", 1, 2)), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    pipeline = on_threads(schedule)
    with torch.autograd.profiler.profile(use_cpu=True, enabled=is_profiled):
        pipeline.executors[0].run(pipeline.stages[0])
    expected = [word for op in schedule.ops[0] for word in (str(op), "end")]
    assert ranges == ([] if is_profiled else expected)


def test_a_message_that_never_comes_ends_the_step():
    pipeline = on_threads(lower(generate("1f1b", 2, 2)), timeout=0.05)
    with pytest.raises(TimeoutError, match=r"rank 1: no message from rank 0 in 0\.05 s"):
        pipeline.executors[1].run(pipeline.stages[1])


def test_a_failed_step_closes_its_recorder(monkeypatch):
    pipeline, recorder = on_threads(lower(generate("zb-h1", 1, 2))), mock.Mock(spec=OpRecorder)
    monkeypatch.setattr(pipeline.stages[0], "forward", mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        pipeline.executors[0].run(pipeline.stages[0], recorder)
    recorder.end.assert_not_called()
    recorder.close.assert_called_once_with()


def test_every_kind_of_operation_has_a_handler():
    executor = over_nccl(lower(generate("zb-h1", 2, 2))).executors[0]
    assert set(executor._handlers) == set(OpKind)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_step_after_a_failed_step_computes_what_autograd_does(monkeypatch, kind):
    pipeline = on_threads(lower(chunk_after_chunk(Placement("linear", 1), 4, OpKind.B, OpKind.W)))
    (stage,), (executor,) = pipeline.stages, pipeline.executors
    compute = getattr(stage, kind)

    def fail_at_2(microbatch, *arguments):
        if microbatch == 2:
            raise ZeroDivisionError
        return compute(microbatch, *arguments)

    monkeypatch.setattr(stage, kind, fail_at_2)
    with pytest.raises(ZeroDivisionError):
        executor.run(stage)
    assert num_live_activations(executor) == 0
    monkeypatch.undo()
    for weight in pipeline.problem.weights[0]:
        weight.grad = None
    reference = Problem(1, 4)
    for _ in range(2):
        pipeline.run()
        reference.run_by_autograd()
        assert_equal(pipeline.problem, reference)


def test_a_backward_that_fails_halfway_defers_nothing_to_the_next_step(monkeypatch):
    pipeline = on_threads(lower(generate("zb-h1", 1, 2)))
    (stage,), (executor,) = pipeline.stages, pipeline.executors
    run_backward = stage.backward

    def fail_after(*arguments):
        run_backward(*arguments)
        raise ZeroDivisionError

    monkeypatch.setattr(stage, "backward", fail_after)
    with pytest.raises(ZeroDivisionError):
        executor.run(stage)
    monkeypatch.undo()
    reference = Problem(1, 2)
    pipeline.run()
    reference.run_by_autograd()
    assert_equal(pipeline.problem, reference)


def test_an_evaluation_does_not_change_the_groups_of_blocks():
    schedule, store = generate("1f1b", 1, 2), mock.Mock(spec=RecomputationStore)
    executor = Executor(lower(schedule.forward_only()), 0, InMemoryNetwork(1).communicator(0), WeightGradStore(), store)
    executor.run(ToyStage(Problem(1, 2), schedule, 0, WeightGradStore()))
    store.forward.assert_not_called()
