"""The network of the runtime's tests keeps NCCL's rules, and finds the faults that are planted here."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from simulated_nccl import Fault, SimulatedNccl
from toy_pipeline import Pipeline, Problem, over_nccl

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime import communicator
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.stage_messages import StageMessages
from megatron.zero_bubble.schedule import Op, OpKind, Placement, lower

SPEC = TensorSpec((2, 3), torch.float32, torch.device("cpu"))
PAIR = Placement("linear", 2)
SEEDS = range(5)


def run_pair(seed: int, source, destination) -> list:
    """Run one function on each of two ranks, with that rank's communicator, and return what both return."""
    network = SimulatedNccl(2, seed)
    ends = network.communicators(PAIR)
    return network.run([partial(source, ends[0]), partial(destination, ends[1])])


def send_ones(rank, count: int = 1) -> None:
    messages = [torch.ones(SPEC.shape) for _ in range(count)]
    for send in [rank.send(message, 1) for message in messages]:
        send.wait()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_buffer_holds_nan_until_it_has_been_waited_for(seed):
    def receive(rank):
        pending = rank.receive(0, SPEC)
        before = pending.buffer.clone()
        return before, pending.wait()

    _, (before, after) = run_pair(seed, send_ones, receive)
    assert before.isnan().all()
    assert torch.equal(after, torch.ones(SPEC.shape))


def test_a_message_is_read_when_it_is_delivered():
    def send(rank):
        message = torch.ones(SPEC.shape)
        pending = rank.send(message, 1)
        message.fill_(7.0)
        pending.wait()

    def receive(rank):
        return rank.receive(0, SPEC).wait()

    arrived = {run_pair(seed, send, receive)[1][0, 0].item() for seed in range(20)}
    assert arrived == {1.0, 7.0}, "soon or late, as the seed has it"


def test_a_sender_is_told_late():
    def send(rank):
        pending = rank.send(torch.ones(SPEC.shape), 1)
        answers = [pending.is_done() for _ in range(40)]
        pending.wait()
        return [*answers, pending.is_done()]

    def receive(rank):
        rank.receive(0, SPEC).wait()

    answers = [run_pair(seed, send, receive)[0] for seed in range(20)]
    assert all(told == sorted(told) for told in answers), "what is done stays done"
    assert len({told.count(False) for told in answers}) > 4
    assert all(told[-1] for told in answers)


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_of_a_channel_arrive_in_order(seed):
    def send(rank):
        messages = [torch.full(SPEC.shape, float(k)) for k in range(4)]
        for pending in [rank.send(message, 1) for message in messages]:
            pending.wait()

    def receive(rank):
        pending = [rank.receive(0, SPEC) for _ in range(4)]
        return [receive.wait()[0, 0].item() for receive in reversed(pending)]

    assert run_pair(seed, send, receive)[1] == [3.0, 2.0, 1.0, 0.0]


def test_a_seed_finds_again_what_it_found():
    def trace(seed: int) -> list[str]:
        pipeline = over_nccl(lower(generate("zb-2p", 4, 8)), seed)
        events: list[str] = []
        for rank, stage in enumerate(pipeline.stages):
            stage.before_gradients = lambda op, rank=rank: events.append(f"{rank} {op}")
        pipeline.run()
        return events

    traces = [trace(seed) for seed in (0, 0, 1, 2)]
    assert traces[0] == traces[1]
    assert traces[0] != traces[2] != traces[3]


def test_ranks_that_wait_for_each_other_are_told_at_once():
    def wait(rank, other):
        rank.receive(other, SPEC).wait()
        rank.send(torch.ones(SPEC.shape), other).wait()

    with pytest.raises(
        Fault, match=r"stand still: rank 0 waits for message 2 of channel 1->0 to be sent; rank 1 waits"
    ):
        run_pair(0, partial(wait, other=1), partial(wait, other=0))


def test_a_message_that_nobody_receives_is_a_fault():
    with pytest.raises(Fault, match="rank 0 waits for message 3 of channel 0->1 to be received"):
        run_pair(0, partial(send_ones, count=2), lambda rank: rank.receive(0, SPEC).wait())


def test_a_rank_that_fails_ends_the_others():
    with pytest.raises(ZeroDivisionError):
        run_pair(0, send_ones, lambda rank: 1 / 0)


SCHEDULE = lower(generate("zb-h1", 3, 6))


def with_reference(seed: int) -> tuple[Pipeline, Problem]:
    """A pipeline, and what should come out of its first step."""
    reference = Problem(SCHEDULE.num_stages, SCHEDULE.num_microbatches)
    reference.run_by_autograd()
    return over_nccl(SCHEDULE, seed), reference


def differs(ours: Problem, reference: Problem) -> bool:
    pairs = list(zip(ours.gradients(), reference.gradients(), strict=True))
    return not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_wait_is_found(monkeypatch, seed):
    pipeline, reference = with_reference(seed)
    monkeypatch.setattr(communicator._TorchReceive, "wait", lambda self: self.buffer)
    with pytest.raises(Fault, match=r"message 2 of channel 0->1 was not waited for"):
        pipeline.run()
    assert differs(pipeline.problem, reference)
    assert all(loss.isnan() for loss in pipeline.problem.losses.values())


def dropped_sends(monkeypatch) -> None:
    """Forget sends, done or not."""
    monkeypatch.setattr(StageMessages, "drop_finished_sends", lambda self: self._sends.clear())


def messages_that_are_not_held(monkeypatch) -> None:
    """Make pending sends hold nothing, so that a stage that frees its output loses the values of its message."""
    pending = communicator._TorchSend
    monkeypatch.setattr(communicator, "_TorchSend", lambda work, message: pending(work, torch.empty(0)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plant", [dropped_sends, messages_that_are_not_held])
def test_a_release_before_the_message_has_gone_is_found(monkeypatch, plant, seed):
    pipeline, reference = with_reference(seed)
    plant(monkeypatch)
    with pytest.raises(Fault, match=r"message \d+ of channel \d->\d was released before it was delivered"):
        pipeline.run()
    assert differs(pipeline.problem, reference)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("rank", "kind"), [(0, OpKind.SEND_FORWARD), (1, OpKind.SEND_FORWARD), (2, OpKind.SEND_BACKWARD)]
)
def test_a_swapped_order_is_found(monkeypatch, seed, rank, kind):
    """The network cannot tell messages apart, so the fault shows in the values that arrive."""
    send = Executor._send

    def send_second_first(self, stage, op):
        if self.rank != rank or op != Op(kind, 0):
            send(self, stage, op)
        if self.rank == rank and op == Op(kind, 1):
            send(self, stage, Op(kind, 0))

    monkeypatch.setattr(Executor, "_send", send_second_first)
    pipeline, reference = with_reference(seed)
    pipeline.run()
    assert differs(pipeline.problem, reference)
