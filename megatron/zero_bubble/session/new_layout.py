"""Chooses the layout of a new job: rank 0 plans layouts, and on CPUs all ranks test the best layouts in short runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from math import inf

import torch

from megatron.zero_bubble.mcore.connections import Connections
from megatron.zero_bubble.mcore.model_units import UnitModels
from megatron.zero_bubble.mcore.rehearsal import Contender, rehearse
from megatron.zero_bubble.planner import Plan
from megatron.zero_bubble.planner.choice import choose
from megatron.zero_bubble.runtime.copy_lane import copy_lane, link_rate
from megatron.zero_bubble.runtime.device import least_free_bytes, own_device, return_free_heap
from megatron.zero_bubble.runtime.joint import on_rank
from megatron.zero_bubble.schedule import OpKind
from megatron.zero_bubble.schedule.formats import units_to_json
from megatron.zero_bubble.schedule.kinds import PAIRED
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.session.features import plans_offload
from megatron.zero_bubble.session.files import write_file
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layout_choice import LIMITS, ChosenLayout, LayoutChoice, choose_layout
from megatron.zero_bubble.session.layout_words import flags_of_layout
from megatron.zero_bubble.session.progress_lines import ProgressLines
from megatron.zero_bubble.session.reports import layout_lines, print_line, print_rank_0
from megatron.zero_bubble.session.running import communicator_of
from megatron.zero_bubble.session.start_up import writing

SECONDS = 12.0
"""Approximate duration, in seconds, of a rehearsal (a test run of some layouts)."""
_LONGEST = 4000.0
"""Longest predicted step time, in milliseconds, for which layouts are rehearsed (run for some steps)."""


def new_choice(
    flags: JobFlags, costs: ModelCosts, padded_vocab_size: int, units: tuple[UnitModels, Sequence[int]] | None = None
) -> ChosenLayout:
    """Search for the best layout on rank 0, print it there, and send it to all ranks; a collective call.

    On a CPU, a step with many messages or collectives may take longer than predicted, because ranks wait for cores.
    Therefore, in a job on CPUs, all ranks rehearse the best layouts with and without vocabulary shards, and Megatron's
    split: the ranks run each of these layouts for some steps. The layout is then chosen by the measured times.

    Args:
        costs: the costs of the embedding, of every layer and of the output.
        units: the models of embedding, layers and output for the rehearsal, and for each layer the index of its kind;
            None to rehearse no layout.

    Raises:
        ValueError: no layout fits in the memory; raised on all ranks.
    """
    choices: list[LayoutChoice] = []
    device = own_device()
    free_bytes = least_free_bytes(device) if device.type == "cuda" else None
    rehearses = units is not None and units[0].message.device.type == "cpu"

    def plan() -> list[Contender]:
        choices.append(_planned(flags, costs, padded_vocab_size, device, free_bytes))
        if flags.zero_bubble_unit_costs_output is not None:
            with writing("--zero-bubble-unit-costs-output", flags.zero_bubble_unit_costs_output):
                write_file(flags.zero_bubble_unit_costs_output, units_to_json(choices[0].request.model))
        interlocks = choices[0].request.post_validation
        return [
            Contender(plan.timeline.schedule, plan.timeline.costs, plan.layout, interlocks=interlocks)
            for plan in (_plans_to_rehearse(choices[0]) if rehearses else ())
        ]

    contenders, times = on_rank(0, plan), []
    if contenders and units is not None:
        print_rank_0(f" > rehearsing {len(contenders)} layouts for {SECONDS:g} seconds ...")
        timeout = timedelta(minutes=flags.distributed_timeout_minutes)
        times = rehearse(contenders, *units, lambda: Connections(communicator_of(flags), timeout), SECONDS)

    def decide() -> ChosenLayout:
        choice = _rehearsed(choices[0], times) if times else choices[0]
        layout = flags_of_layout(choice.plan.layout, flags.mtp_num_layers, flags.pattern)
        for line in layout_lines(choice, layout):
            print_line(line)
        request, is_megatrons_split = choice.plan.request, choice.is_megatrons_split
        limits = None if is_megatrons_split else request.limits
        return ChosenLayout({**layout, LIMITS: limits}, request, choice.megatrons_time, is_megatrons_split)

    chosen = on_rank(0, decide)
    return_free_heap()  # measuring, planning and rehearsing leave free memory
    return chosen


def _planned(
    flags: JobFlags, costs: ModelCosts, padded_vocab_size: int, device: torch.device, free_bytes: float | None
) -> LayoutChoice:
    """Search for the best layout that fits in the free memory of every device, and print the progress."""
    progress = ProgressLines(lambda text: print_line(f" > choosing a layout: {text}"))
    rate = link_rate(copy_lane(device), device) if plans_offload(flags) else None
    return choose_layout(flags, costs, free_bytes, padded_vocab_size, host_rate=rate, report=progress)


def _plans_to_rehearse(choice: LayoutChoice) -> list[Plan]:
    """The best plans with and without vocabulary shards, and the plan of megatron-core's schedule on Megatron's split.

    If megatron-core's own schedule does not fit in memory, the planned schedule on Megatron's split replaces it. The
    list of plans is empty if Megatron's split is the chosen layout, or if there is only one plan. The list of plans is
    also empty if a schedule has pairs of F and B or copies to the host, or if a predicted step is longer than
    `_LONGEST`.
    """
    chosen = choice.plan
    rivals = [plan for plan in chosen.others if plan.layout.vocabulary_parallel != chosen.layout.vocabulary_parallel]
    candidates = (chosen, *rivals[:1], *choice.megatrons[-1:])
    plans = list({(plan.layout, plan.request.schedule): plan for plan in candidates}.values())
    kinds = set[OpKind]().union(*(plan.timeline.schedule.kinds for plan in plans))
    is_settled = choice.is_megatrons_split or len(plans) == 1
    if is_settled or kinds & {*PAIRED, OpKind.D} or max(plan.time for plan in plans) > _LONGEST:
        return []
    return plans


def _rehearsed(choice: LayoutChoice, times: Sequence[float]) -> LayoutChoice:
    """Choose a plan again after a rehearsal (a test run of some plans), by the measured step `times` in milliseconds.

    Only the ratios of the measured times count, because a busy machine may be faster or slower during the rehearsal
    than in training. All measured times are therefore scaled so that the last plan, on Megatron's split, keeps its
    predicted time. The rehearsal yields one slowdown for layouts with vocabulary shards and one for layouts without
    vocabulary shards. The predicted times of layouts that were not rehearsed are multiplied by the matching slowdown.
    """
    request, planned = choice.request, _plans_to_rehearse(choice)
    unit = planned[-1].time / times[-1]
    plans = [_delayed(plan, unit * time / plan.time) for plan, time in zip(planned, times, strict=True)]
    own = [plan for plan in plans if plan.request.schedule != request.schedule]
    ours = [plan for plan in plans if plan.request.schedule == request.schedule]
    if all(plan.layout != request.usual for plan in ours):
        ours += [_delayed(plan, 1.0) for plan in choice.megatrons[:-1]]
    is_allowed = request.usual is not None and request.allows(request.usual)
    rivals = [plan for plan in ours if is_allowed or plan.layout != request.usual]
    chosen = choose(rivals, request.usual, own[0].time if own and is_allowed else inf)

    delays = {
        before.layout.vocabulary_parallel: after.time / before.time
        for before, after in zip(planned, plans, strict=True)
        if after not in own
    }
    combinations = {plan.layout.combination for plan in ours}
    others = [plan for plan in choice.plan.others if plan.layout.combination not in combinations]
    corrected = (_delayed(plan, delays.get(plan.layout.vocabulary_parallel, 1.0)) for plan in others)
    return LayoutChoice(
        replace(chosen, others=tuple(sorted((*chosen.others, *corrected), key=lambda plan: plan.time))),
        tuple(plan for plan in (*ours, *own) if plan.layout == request.usual),
        request,
        tuple((before, after.time) for before, after in zip(planned, plans, strict=True)),
    )


def _delayed(plan: Plan, factor: float) -> Plan:
    """Return a copy of `plan` with the predicted time multiplied by `factor`, and without the list of other plans."""
    return replace(plan, slowdown=factor * plan.slowdown, others=())
