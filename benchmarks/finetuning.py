"""Measure the planned order of microbatches of different lengths in real training, and compare it with 1F1B.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.finetuning --steps 30

The benchmark uses the model and the conversations of `examples/finetune_conversations.py`. Each step runs three times
on the same microbatches: under 1F1B in data order, under `--schedule` in data order, and under `--schedule` in the
planned order. The first steps, in which the costs are measured, do not count. The last lines have ratios of times, as
medians over the steps with 95% intervals, and the difference between predicted and measured times. Run this benchmark
while nothing else uses the machine.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from examples.finetune_conversations import build_stage, forward_backward, microbatch, with_optimizer
from megatron.zero_bubble import WeightGradStore, get_forward_backward_func, split_weight_gradients
from megatron.zero_bubble.cli.benchmark.training_results import bootstrap_interval
from megatron.zero_bubble.cli.invocation import at_least, command
from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.runtime.step_planner import FIRST_STEPS, REFITTED_AFTER
from megatron.zero_bubble.session.flag_parser import flag

_NOT_COUNTED = FIRST_STEPS[1] + REFITTED_AFTER
"""Number of steps until the costs are fitted to all samples."""


@dataclass(frozen=True)
class FinetuningFlags:
    """fine-tuning"""

    num_microbatches: int = flag("conversations of a step", 8, parse=at_least(1))
    schedule: str = flag("schedule of the second and third contestant", "zb-h1")
    steps: int = flag("steps that count", 30, parse=at_least(2))
    seed: int = flag("of the conversations", 1)


@command("benchmarks.finetuning", FinetuningFlags, __doc__)
def main(flags: FinetuningFlags) -> None:
    if not torch.cuda.is_available():
        substitute_cuda()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    torch.manual_seed(flags.seed)
    model_parallel_cuda_manual_seed(flags.seed)
    stage, store = build_stage(), WeightGradStore()
    split_weight_gradients([stage], store)
    model, optimizer = with_optimizer(stage, delay_wgrad_compute=True)
    contestants = [
        get_forward_backward_func(name, store, orders_microbatches=is_ordered)
        for name, is_ordered in (("1f1b", False), (flags.schedule, False), (flags.schedule, True))
    ]
    rows, predicted = [], []
    generator = random.Random(flags.seed)
    for step in range(_NOT_COUNTED + flags.steps):
        batch = [microbatch(generator) for _ in range(flags.num_microbatches)]
        # A different contestant goes first in each step.
        order = [(step + place) % len(contestants) for place in range(len(contestants))]
        seconds = {number: _seconds(contestants[number], model, batch) for number in order}
        optimizer.step()
        times = contestants[-1].step_plans.take_times()
        if step >= _NOT_COUNTED:
            rows.append([1000.0 * seconds[number] for number in range(len(contestants))])
            predicted.append(times.predicted if times is not None and times.num_steps else None)
    if dist.get_rank() == 0:
        _print(flags, rows, predicted)
    for contestant in contestants:
        contestant.close()
    dist.destroy_process_group()


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def _seconds(run: ForwardBackward, model: Any, batch: list[dict[str, torch.Tensor]]) -> float:
    """The time of one step under one schedule and order, until all ranks are done."""
    model.zero_grad_buffer()
    begin = _now()
    forward_backward(run, model, iter(batch), len(batch))
    return _now() - begin


def _print(flags: FinetuningFlags, rows: Sequence[Sequence[float]], predicted: Sequence[float | None]) -> None:
    names = ("1f1b, order of the data", f"{flags.schedule}, order of the data", f"{flags.schedule}, planned order")
    for number, name in enumerate(names):
        ratios = [row[0] / row[number] for row in rows]
        low, high = bootstrap_interval(ratios) or (min(ratios), max(ratios))
        mean = fmean(row[number] for row in rows)
        print(f"{name}: {mean:.1f} ms, {median(ratios):.3f} ({low:.3f} .. {high:.3f}) times as fast as 1f1b")
    ratios = [row[1] / row[2] for row in rows]
    low, high = bootstrap_interval(ratios) or (min(ratios), max(ratios))
    print(f"planned order beside the order of the data: {median(ratios):.3f} ({low:.3f} .. {high:.3f})")
    both = [(time, row[2]) for time, row in zip(predicted, rows, strict=True) if time is not None]
    errors = [abs(measured / time - 1) for time, measured in both]
    if errors:
        total = sum(measured for _, measured in both) / sum(time for time, _ in both) - 1
        print(
            f"measured beside predicted, {len(both)} steps: {fmean(errors):.1%} apart in the mean, "
            f"{total:+.1%} over all, {max(errors):.1%} at most"
        )


if __name__ == "__main__":
    sys.exit(main())
