"""Searches the layout of a job on one rank, prints what was found, and tells all ranks."""

from __future__ import annotations

import torch

from megatron.zero_bubble.runtime.joint import on_rank
from megatron.zero_bubble.runtime.replanner import least_free_bytes
from megatron.zero_bubble.schedule.formats import units_to_json
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.session.files import write_file
from megatron.zero_bubble.session.layout_choice import ChosenLayout, choose_layout
from megatron.zero_bubble.session.layout_words import flags_of_layout
from megatron.zero_bubble.session.progress_lines import ProgressLines
from megatron.zero_bubble.session.reports import layout_lines, print_line
from megatron.zero_bubble.session.settings import JobSettings


def new_choice(job: JobSettings, costs: ModelCosts, padded_vocab_size: int) -> ChosenLayout:
    """Search for the best layout on rank 0, print what it found, and tell all ranks; a collective call.

    Raises:
        ValueError: no layout fits in the memory; raised on all ranks.
    """
    device = torch.device(torch.cuda.current_device())
    free_bytes = least_free_bytes(device) if device.type == "cuda" else None

    def choose() -> ChosenLayout:
        progress = ProgressLines(lambda text: print_line(f" > choosing a layout: {text}"))
        choice = choose_layout(job.flags, costs, free_bytes, padded_vocab_size, report=progress)
        plan = choice.plan
        if job.flags.zero_bubble_unit_costs_output is not None:
            _write(job.flags.zero_bubble_unit_costs_output, choice.model)
        chosen = ChosenLayout(
            flags_of_layout(plan.layout, job.flags.mtp_num_layers, job.flags.pattern),
            plan.request,
            choice.megatrons_time,
            choice.is_megatrons_split,
        )
        for line in layout_lines(choice, chosen.flags):
            print_line(line)
        return chosen

    return on_rank(0, choose)


def _write(output: str, model: ModelCosts) -> None:
    try:
        write_file(output, units_to_json(model))
    except OSError as error:
        raise ValueError(f"--zero-bubble-unit-costs-output {output}: cannot be written: {error.strerror}") from error
