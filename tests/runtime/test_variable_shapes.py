"""Messages whose shape a header tells arrive whole and in order under every schedule, and no rank stands still."""

from __future__ import annotations

from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
import torch
from simulated_nccl import SimulatedNccl
from toy_pipeline import WIDTH, Pipeline, Problem, Threads, ToyStage

from megatron.zero_bubble.planner import generate, names
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.stage_messages import StageMessages
from megatron.zero_bubble.runtime.variable_shapes import (
    AnnouncedSpec,
    AnswerSpec,
    VariableCommunicator,
    refuse_one_queue,
)
from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule, lower
from tests.runtime.in_memory import InMemoryNetwork

CPU = torch.device("cpu")
SHAPED = AnnouncedSpec(torch.float32, CPU)


class VariableStage(ToyStage):
    """Toy stages that do not know the shape of an activation before it arrives."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.sent: dict[tuple[int, int], TensorSpec] = {}

    def forward(self, microbatch, chunk, input_tensor):
        output = super().forward(microbatch, chunk, input_tensor)
        self.sent[chunk, microbatch] = TensorSpec(tuple(output.shape), output.dtype, output.device)
        return output

    def message_spec(self, op):
        if op.kind is OpKind.RECV_FORWARD:
            return SHAPED
        return AnswerSpec(partial(self.sent.get, (op.chunk, op.microbatch)))


class VariablePipeline(Pipeline):
    stage_type = VariableStage

    def run_with(self, data: list[torch.Tensor]) -> None:
        """Run one step on microbatches of these shapes."""
        self.problem.data = data
        for stage in self.stages:
            stage.sent.clear()
        self.run()


class VariableNccl(SimulatedNccl):
    def communicators(self, placement: Placement) -> list[VariableCommunicator]:
        headers = super().communicators(placement, "headers of ")
        return list(map(VariableCommunicator, super().communicators(placement), headers))


class VariableThreads(Threads):
    def communicators(self, placement: Placement) -> list[VariableCommunicator]:
        headers = Threads(placement.num_ranks).communicators(placement)
        return list(map(VariableCommunicator, super().communicators(placement), headers))


def random_data(random: Random, num_microbatches: int) -> list[torch.Tensor]:
    """Microbatches with up to three dimensions before the last, whose sizes change now and then."""
    shapes = [[random.choice([1, 2, 3, 5, 9]) for _ in range(random.choice([1, 1, 2, 3]))] for _ in range(3)]
    return [torch.randn(*random.choice(shapes), WIDTH) for _ in range(num_microbatches)]


def assert_like_one_process(schedule: Schedule, network, random: Random, num_steps: int) -> None:
    reference = Problem(schedule.num_stages, schedule.num_microbatches)
    problem = Problem(schedule.num_stages, schedule.num_microbatches)
    pipeline = VariablePipeline(schedule, problem, network)
    for _ in range(num_steps):
        reference.data = random_data(random, schedule.num_microbatches)
        pipeline.run_with(reference.data)
        reference.run_by_autograd()
        assert all(torch.equal(problem.losses[m], loss) for m, loss in reference.losses.items())
        for gradient, expected in zip(problem.gradients(), reference.gradients(), strict=True):
            assert torch.equal(gradient, expected)


@pytest.mark.parametrize("name", names())
def test_every_schedule_computes_what_autograd_does_under_nccl_s_rules(name):
    for num_ranks, num_microbatches in ((2, 4), (4, 8)):
        random = Random(f"{name} {num_ranks}")
        schedule = lower(generate(name, num_ranks, num_microbatches))
        assert_like_one_process(schedule, VariableNccl(num_ranks, seed=num_ranks), random, num_steps=3)


# Three sequences of every schedule run above, under stricter rules. The sequences of all schedules are a thousand.
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", names())
def test_a_thousand_sequences_of_shapes(name):
    schedule = lower(generate(name, 4, 8))
    assert_like_one_process(schedule, VariableThreads(4), Random(name), num_steps=1000 // len(names()) + 1)


def test_a_message_keeps_its_place_behind_one_whose_shape_is_not_known_yet():
    messages, headers = InMemoryNetwork(2), InMemoryNetwork(2)
    sender, receiver = (VariableCommunicator(messages.communicator(r), headers.communicator(r)) for r in (0, 1))
    first, second = torch.ones(2, 3), torch.zeros(4)
    expected = receiver.receive(0, SHAPED), receiver.receive(0, TensorSpec((4,), torch.float32, CPU))
    sender.announce(first, 1)
    for tensor in (first, second):
        sender.send(tensor, 1)
    assert torch.equal(expected[1].wait(), second)
    assert torch.equal(expected[0].wait(), first)
    assert headers.undelivered() == messages.undelivered() == []


def test_a_receive_of_known_shape_is_posted_at_once_as_without_headers():
    messages = InMemoryNetwork(2)
    receiver = VariableCommunicator(messages.communicator(1), InMemoryNetwork(2).communicator(1))
    shapes: list[TensorSpec] = []
    receives = [receiver.receive(0, AnswerSpec(lambda: shapes[0] if shapes else None)) for _ in range(2)]
    assert [receive.posted for receive in receives] == [None, None]
    shapes.append(TensorSpec((1,), torch.float32, CPU))
    last = receiver.receive(0, shapes[0])
    assert all(receive.posted is not None for receive in (*receives, last))


def test_one_hardware_queue_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    refuse_one_queue(CPU)
    with pytest.raises(ValueError, match=r"several hardware queues: unset CUDA_DEVICE_MAX_CONNECTIONS, which is 1"):
        refuse_one_queue(torch.device("cuda"))
    with pytest.raises(ValueError, match=r"^messages of several tensors need several hardware queues: "):
        refuse_one_queue(torch.device("cuda"), "messages of several tensors")


class Sending:
    """A channel whose sends end when a test says so; gloo's sends end for a rank that waits."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.are_done = False

    def send(self, tensor: torch.Tensor, destination: int) -> SimpleNamespace:
        self.sent.append(tensor)
        return SimpleNamespace(is_done=lambda: self.are_done, wait=lambda: None)


def test_headers_are_on_the_cpu_and_keep_no_message_in_memory():
    schedule = lower(generate("1f1b", 2, 3))
    messages, headers = Sending(), Sending()
    passed = StageMessages(schedule, 0, VariableCommunicator(messages, headers))
    with torch.device("meta"):  # torch's default device
        for microbatch in range(3):
            passed.hand_on(Op(OpKind.F, microbatch), torch.zeros(2, microbatch + 1, device="cpu"), is_forward=True)
            passed.send(Op(OpKind.SEND_FORWARD, microbatch))
    assert [header[:3].tolist() for header in headers.sent] == [[2, 2, 1], [2, 2, 2], [2, 2, 3]]
    messages.are_done = True
    passed.drop_finished_sends()
    assert not passed._sends
    passed.finish_sends()
