"""Channels on a GPU: how NCCL is set up, and how far a process may be ahead of its device."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing
from toy_pipeline import Problem, ToyStage

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime.communicator import TorchCommunicator
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.process_group import Membership, connect
from megatron.zero_bubble.runtime.stage_messages import StageMessages
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Placement, lower


def test_a_nccl_channel_has_a_name_a_high_priority_and_few_blocks(monkeypatch):
    """A stand-in for NCCL shows the options that it gets, because torch for CPUs has none."""
    made = []

    class ProcessGroupNCCL:
        class Options:
            def __init__(self, is_high_priority_stream=False):
                self.is_high_priority_stream = is_high_priority_stream
                self.config = SimpleNamespace(max_ctas=-1)

        def __init__(self, store, rank, size, options):
            made.append((rank, size, options))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        name = "megatron.zero_bubble/6->2"
        connect(Membership(name, (6, 2), 1, torch.device("cuda", 0), timedelta(minutes=3)))
    finally:
        dist.destroy_process_group()
    ((rank, size, options),) = made
    assert (rank, size) == (1, 2)
    assert options.is_high_priority_stream
    assert options.config.max_ctas == 4
    assert (options.group_name, options.global_ranks_in_group) == ("megatron.zero_bubble/6->2", [6, 2])
    assert options._timeout == timedelta(minutes=3)


class Gpu:
    """A GPU that computes nothing until somebody waits for it, with the process group of one of its channels."""

    def __init__(self) -> None:
        self.posted = self.reached = 0
        self.most = 0

    def post(self) -> SimpleNamespace:
        self.posted += 1
        self.most = max(self.most, self.posted - self.reached)
        at = self.posted
        return SimpleNamespace(
            is_completed=lambda: self.reached >= at, wait=lambda: None, synchronize=lambda: self.reach(at)
        )

    def event(self, blocking: bool) -> SimpleNamespace:
        at = self.posted
        return SimpleNamespace(record=lambda: None, synchronize=lambda: self.reach(at))

    def reach(self, at: int) -> None:
        self.reached = max(self.reached, at)

    def send(self, tensors, destination, tag):
        return self.post()

    def recv(self, tensors, source, tag):
        return self.post()


def test_a_process_is_only_some_messages_ahead_of_its_gpu(monkeypatch):
    """A bound on messages under way releases sent tensors in time, here on the middle of three ranks."""
    schedule = lower(generate("1f1b", 3, 40))
    gpu, waiting = Gpu(), []

    drop_finished = StageMessages.drop_finished_sends

    def drop_and_count(self):
        drop_finished(self)
        waiting.append(len(self._sends))

    monkeypatch.setattr(StageMessages, "drop_finished_sends", drop_and_count)
    monkeypatch.setattr(TorchCommunicator, "_open", lambda self, device: None)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    placement, cuda = schedule.placement, torch.device("cuda")
    communicator = TorchCommunicator(range(3), 1, placement, cuda, timedelta(), lambda end: gpu)
    store = WeightGradStore()
    Executor(schedule, 1, communicator, store).run(ToyStage(Problem(3, 40), schedule, 1, store))
    assert gpu.posted == 4 * 40
    assert gpu.most == 9
    assert max(waiting) < 9


def test_on_a_gpu_the_marks_are_events(monkeypatch):
    calls = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking, "a process that waits leaves its core to others"

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(TorchCommunicator, "_open", lambda self, device: None)
    placement = Placement("linear", 2)
    end = TorchCommunicator(range(2), 0, placement, torch.device("cuda"), timedelta(), lambda end: Gpu())
    for _ in range(9):
        end.send(torch.ones(1), 1)
    assert calls == ["record"] * 8 + ["wait", "record"]
