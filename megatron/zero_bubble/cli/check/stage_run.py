"""Measures a middle stage of a pipeline: the executor runs the stage as in training, but receives random tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

import torch

from megatron.zero_bubble.cli.check.models import Model
from megatron.zero_bubble.cli.trainings import rank_model
from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.mcore.step_call import StepCall
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.made_up_neighbours import MadeUpNeighbours
from megatron.zero_bubble.runtime.memory_meter import memory_meter
from megatron.zero_bubble.runtime.profiler import Profiler
from megatron.zero_bubble.runtime.recorder import MeasuredOp, OpRecorder, device_clock
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import OpKind, Placement, Schedule, StageCosts, lower, simulate
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.forward_step import make_forward_step

NUM_RANKS, RANK = 4, 1
NUM_MICROBATCHES = 8


@dataclass(frozen=True)
class StageProfile:
    """Measurements of a stage: times in milliseconds, and the memory of one microbatch in bytes."""

    times: Mapping[OpKind, Sequence[float]]
    """Measured times of each kind of operation: F, B and W with a split backward, and BW with a fused backward."""
    memory: Mapping[OpKind, float]
    temporary: float
    """Largest temporary memory of an operation: memory that is in use neither before nor after the operation."""

    def time(self, kind: OpKind) -> float:
        return median(self.times[kind])

    @property
    def price(self) -> float:
        """The sum of the times of B and W, divided by the time of the fused backward."""
        return (self.time(OpKind.B) + self.time(OpKind.W)) / self.time(OpKind.BW)

    def costs(self, num_stages: int, message_ms: float) -> StageCosts:
        """Return the costs of a pipeline of `num_stages` equal stages with the measured times and memory."""
        kinds = {"f": OpKind.F, "b": OpKind.B, "w": OpKind.W}
        times = {f"time_{name}": self.time(kind) for name, kind in kinds.items()}
        memory = {f"memory_{name}": self.memory[kind] for name, kind in kinds.items()}
        return StageCosts.uniform(num_stages, **times, **memory, time_comm=message_ms)


@dataclass(frozen=True)
class MemoryCheck:
    """Peak memory of a step in bytes, measured on the device and simulated.

    The simulated peak is the peak of the activations plus the largest temporary memory of an operation.
    """

    schedule: str
    measured: float
    simulated: float
    tolerance: float = 0.05

    @property
    def passed(self) -> bool:
        return abs(self.measured / self.simulated - 1) <= self.tolerance


class MiddleStage:
    """A middle stage of a pipeline, built once with a split backward and once with a fused backward.

    A `MiddleStage` must be created within the context manager `one_process`.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self._args = model.arguments(NUM_RANKS)
        self._device = device
        self._placement = Placement("linear", NUM_RANKS)
        self._store = WeightGradStore()
        self._split = rank_model(self._args, self._placement, RANK, self._store)
        self._whole = rank_model(self._args, self._placement, RANK, None)

    def profile(self, rounds: int) -> StageProfile:
        """Measure the times of operations with a split and with a fused backward, and the memory of operations.

        Each of the `rounds` measured rounds runs a step with a split backward and a step with a fused backward. Before
        the measured rounds, one round runs unmeasured.
        """
        split, whole = (lower(generate(name, NUM_RANKS, NUM_MICROBATCHES)) for name in ("zb-h1", "1f1b"))
        times: dict[OpKind, list[float]] = {}
        for number in range(1 + rounds):
            ops = self._run(split, self._split) + [
                timed for timed in self._run(whole, self._whole) if timed.op.kind is OpKind.BW
            ]
            for timed in ops if number else ():
                times.setdefault(timed.op.kind, []).append(1e3 * (timed.end - timed.start))
        profiler = Profiler(self._placement, RANK)
        profiler.add(self._run(split, self._split, with_memory=True))
        [costs] = profiler.costs()
        return StageProfile(times, costs.memory, costs.inside)

    def check_memory(self, name: str, profile: StageProfile) -> MemoryCheck:
        """Compare the measured and the simulated peak memory of one step under the schedule `name`."""
        costs = profile.costs(NUM_RANKS, 0.0)
        schedule = generate(name, NUM_RANKS, NUM_MICROBATCHES, costs=costs)
        simulated = simulate(schedule, costs).peak_memory[RANK] + profile.temporary
        return MemoryCheck(name, self._peak(lower(schedule)), float(simulated))

    def _peak(self, schedule: Schedule) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._run(schedule, self._split)
            return torch.cuda.max_memory_allocated() - before
        # A CPU's allocator reports no peak, so the memory that operations hold is added up.
        ops = self._run(schedule, self._split, with_memory=True)
        return float(max(accumulate(timed.memory_change or 0 for timed in ops)))

    def _run(self, schedule: Schedule, chunks: list[Any], *, with_memory: bool = False) -> list[MeasuredOp]:
        """Run one step and return the measured operations; if memory is measured as well, the times are meaningless."""
        stage = make_stage(self._args, self._placement, RANK, chunks, self._device)
        meter = memory_meter(self._device, self._store) if with_memory else None
        recorder = OpRecorder(device_clock(self._device), meter)
        Executor(schedule, RANK, MadeUpNeighbours(), self._store).run(stage, recorder)
        stage.finish()
        return recorder.take()


def make_stage(
    args: Arguments, placement: Placement, rank: int, chunks: list[Any], device: torch.device
) -> MegatronStage:
    """Return the `MegatronStage` of a pipeline rank for one step, with the same random batches on every rank."""
    batches = _batches(args, device)
    call = StepCall(
        forward_step_func=make_forward_step(args),
        data_iterator=[iter(batches) for _ in chunks],
        model=chunks,
        num_microbatches=NUM_MICROBATCHES,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    return MegatronStage(call, call.data_iterators, placement, rank, device, finalizes=False)


def _batches(args: Arguments, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Return the batches of one step; every rank gets the same batches."""
    shape = (args.micro_batch_size, args.seq_length)
    generator = torch.Generator().manual_seed(args.seed)
    assert args.vocab_size is not None

    def numbers() -> torch.Tensor:
        return torch.randint(args.vocab_size or 1, shape, generator=generator).to(device)

    positions = torch.arange(args.seq_length, device=device).expand(shape)
    mask = torch.ones(shape, device=device)
    return [
        {"tokens": numbers(), "labels": numbers(), "position_ids": positions, "loss_mask": mask}
        for _ in range(NUM_MICROBATCHES)
    ]
