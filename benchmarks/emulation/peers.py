"""Runs the schedules of torch.distributed.pipelining with the same emulated compute as this project's schedules.

The runtime of torch.distributed.pipelining splits a backward along the autograd graph: B is the path from the output to
the input, and W consists of the branches to the parameters. B and W therefore sleep in separate autograd nodes, so that
the split works as intended:

    input --- B ---+
                   join --- output
    weight --- W --+
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from benchmarks.emulation.sleeping import Emulation, await_arrival
from benchmarks.emulation.stage_times import StageTimes
from megatron.zero_bubble.schedule import Placement, StageCosts

ONE_CHUNK = {"GPipe": "gpipe", "1F1B": "1f1b"}
"""Name of a PyTorch schedule with one chunk a rank -> name of this project's schedule with the same order."""
SEVERAL_CHUNKS = ("Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def peer_placements(num_ranks: int, num_chunks: int) -> dict[str, Placement]:
    """Return name in torch.distributed.pipelining -> placement that the schedule prescribes."""
    return {
        **dict.fromkeys(ONE_CHUNK, Placement("linear", num_ranks)),
        **dict.fromkeys(SEVERAL_CHUNKS, Placement("interleaved", num_ranks, num_chunks)),
        **dict.fromkeys(V_SHAPED, Placement("v", num_ranks, 2)),
    }


def torch_schedule(
    name: str, stages: list[PipelineStage], num_microbatches: int, loss: Callable[..., torch.Tensor]
) -> Any:
    """Return the schedule `name` of torch.distributed.pipelining for the stages of one rank.

    Raises:
        ValueError: the schedule refuses the number of microbatches.
    """
    schedule_class: Any = get_schedule_class(name)
    of_one_stage = issubclass(schedule_class, PipelineScheduleSingle)
    return schedule_class(stages[0] if of_one_stage else stages, num_microbatches, loss_fn=loss, scale_grads=False)


@dataclass(frozen=True)
class Peer:
    """A schedule of torch.distributed.pipelining with its number of microbatches, its placement and its costs."""

    name: str
    costs: StageCosts
    placement: Placement
    num_microbatches: int


class PeerRun:
    """Runs one rank of a schedule of torch.distributed.pipelining.

    Raises `ValueError` if the schedule refuses the number of microbatches.
    """

    def __init__(self, peer: Peer, emulation: Emulation, rank: int) -> None:
        placement = peer.placement
        self._num_microbatches = peer.num_microbatches
        stages = []
        for chunk in range(placement.num_chunks):
            times = StageTimes(peer.costs, placement, placement.stage_of(rank, chunk))
            stages.append(_make_stage(times, emulation, placement))
        self._schedule = torch_schedule(peer.name, stages, peer.num_microbatches, _loss)
        self._input = emulation.spec.empty().repeat(peer.num_microbatches, 1)
        self._target = torch.zeros(peer.num_microbatches, 1)
        self._has_first = any(stage.is_first for stage in stages)
        self._has_last = any(stage.is_last for stage in stages)

    def step(self) -> None:
        inputs = (self._input,) if self._has_first else ()
        self._schedule.step(*inputs, target=self._target if self._has_last else None, return_outputs=False)

    def order(self) -> list[list[str]]:
        """Return the actions of every rank in order; an idle slot is an empty word.

        For schedules with one chunk a rank, torch.distributed.pipelining keeps this order only for display, and runs a
        different order.
        """
        order = self._schedule.pipeline_order
        return [[str(action or "") for action in order[rank]] for rank in sorted(order)]


def _make_stage(times: StageTimes, emulation: Emulation, placement: Placement) -> PipelineStage:
    """Return a `PipelineStage` with given shapes, so that the runtime need not run the stage to find the shapes."""
    example = emulation.spec.empty()
    return PipelineStage(
        _Module(times, emulation),
        times.stage,
        placement.num_stages,
        torch.device("cpu"),
        input_args=example.clone().requires_grad_(not times.is_first),
        output_args=(torch.zeros(1, 1) if times.is_last else example.clone()).requires_grad_(),
    )


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


class _Module(torch.nn.Module):
    def __init__(self, times: StageTimes, emulation: Emulation) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self._times, self._emulation = times, emulation
        # The first stage's input needs no gradient; the anchor does, so that its B runs and takes time like any other.
        self._anchor = torch.zeros(1, requires_grad=times.is_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = _InputNode.apply(x, self._anchor, self._times, self._emulation)
        # Autograd runs the newest nodes first: in a whole backward, W runs before B and its message.
        return _Join.apply(output, _WeightNode.apply(self.weight, self._times, self._emulation), self._times)


class _InputNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, times: StageTimes, emulation: Emulation) -> Any:
        ctx.times, ctx.emulation = times, emulation
        if not times.is_first:
            await_arrival(x)
        if times.is_last:
            emulation.compute(times.time_f)
            return torch.zeros(1, 1)
        return emulation.compute(times.time_f, *times.of_output)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.times.is_first:
            ctx.emulation.compute(ctx.times.time_b)
            return None, None, None, None
        return *ctx.emulation.compute(ctx.times.time_b, *ctx.times.of_gradient), None, None, None


class _WeightNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, times: StageTimes, emulation: Emulation) -> Any:
        ctx.times, ctx.emulation = times, emulation
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.emulation.compute(ctx.times.time_w)
        return grads[0], None, None


class _Join(torch.autograd.Function):
    """Autograd node where the paths of B and W meet; the backward of this node runs once for B and once for W."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, weight: torch.Tensor, times: StageTimes) -> Any:
        ctx.times = times
        ctx.mark_dirty(output)  # the runtime detaches outputs in place, which fails on a view
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if not ctx.times.is_last:
            await_arrival(grads[0])
        return grads[0], torch.zeros(1), None
