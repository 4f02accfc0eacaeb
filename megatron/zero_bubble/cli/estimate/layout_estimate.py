"""Estimates the layout that a training under `--zero-bubble` would choose for a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import Estimate, message_ms, unit_costs
from megatron.zero_bubble.job.flags import flags_text
from megatron.zero_bubble.job.job_flags import keeping_everything
from megatron.zero_bubble.job.layout_choice import LayoutChoice, choose_layout
from megatron.zero_bubble.job.layout_table import layout_lines
from megatron.zero_bubble.job.layout_words import flags_of_layout
from megatron.zero_bubble.job.profiled_costs import fit_units
from megatron.zero_bubble.schedule.model_costs import ModelCosts, with_states
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.training.model_size import StageLayers


@dataclass(frozen=True)
class LayoutEstimate:
    """The layout that a training would choose, with the estimate of its schedule."""

    choice: LayoutChoice
    flags: Mapping[str, Any]
    """The flags, by name, that fix the layout; None for one that is left out."""
    estimate: Estimate

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table that the training would print."""
        return layout_lines(self.choice, self.flags)

    def as_json(self) -> dict[str, Any]:
        layout = self.choice.plan.layout
        return {
            "placement": layout.placement.kind,
            "num_chunks": layout.placement.num_chunks,
            "partition": list(layout.partition),
            "recompute": layout.recompute.value,
            "flags": flags_text(self.flags),
            **self.estimate.as_json(None),
        }


def estimate_layout(job: EstimatedJob) -> LayoutEstimate:
    """Search the layouts that the job's flags leave open, as its training would, with the costs of an estimate.

    Raises:
        ValueError: no layout fits, or (as `ScheduleError`) there are fewer layers than ranks.
    """
    free_bytes = job.cluster.memory - job.cluster.reserved
    vocabulary = job.args.padded_vocab_size
    choice = choose_layout(job.flags, model_costs(job), free_bytes, vocabulary, is_quick=job.is_quick)
    plan = choice.plan
    flags = flags_of_layout(plan.layout, job.flags.mtp_num_layers)
    return LayoutEstimate(choice, flags, Estimate(job.with_flags(flags), plan.timeline, plan.states))


def model_costs(job: EstimatedJob) -> ModelCosts:
    """Return the costs of the job's units in milliseconds and bytes, those of layers by the profile if there is one.

    R is what it would be if every layer were recomputed by itself; F and B are those without full recomputation.
    """
    planned = {**keeping_everything(job.args), "zero_bubble_recompute": Recompute.PLANNED.value}
    recomputing = replace(job, args=replace(job.args, **planned))
    embedding = unit_costs(recomputing, StageLayers(0, is_first=True, is_last=False))
    layer = unit_costs(recomputing, StageLayers(1, is_first=False, is_last=False))
    output = unit_costs(recomputing, StageLayers(0, is_first=False, is_last=True))
    layers = (layer,) * job.args.num_layers
    if job.profile is None:
        return ModelCosts(embedding, layers, output, message_ms(job))
    return with_states(fit_units(job.profile), [unit.state for unit in (embedding, *layers, output)])
