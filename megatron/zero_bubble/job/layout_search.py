"""Searches the layout of a job on one rank, prints what was found, and tells all ranks."""

from __future__ import annotations

import torch

from megatron.zero_bubble.job.layout_choice import ChosenLayout, choose_layout, flags_of_layout
from megatron.zero_bubble.job.layout_table import layout_lines
from megatron.zero_bubble.job.settings import JobSettings
from megatron.zero_bubble.runtime.joint import on_rank
from megatron.zero_bubble.runtime.replanner import least_free_bytes
from megatron.zero_bubble.schedule.model_costs import ModelCosts


def new_choice(job: JobSettings, costs: ModelCosts, padded_vocab_size: int) -> ChosenLayout:
    """Search for the best layout on rank 0, print what it found, and tell all ranks; a collective call.

    Raises:
        ValueError: no layout fits in the memory; raised on all ranks.
    """
    device = torch.device(torch.cuda.current_device())
    free_bytes = least_free_bytes(device) if device.type == "cuda" else None

    def choose() -> ChosenLayout:
        choice = choose_layout(job.flags, costs, free_bytes, padded_vocab_size)
        plan = choice.chosen
        chosen = ChosenLayout(
            flags_of_layout(job.flags, plan.layout), plan.timeline.costs, plan.limits, choice.speed_ups.get("1f1b")
        )
        for line in layout_lines(choice, chosen.flags):
            print(line, flush=True)
        return chosen

    return on_rank(0, choose)
