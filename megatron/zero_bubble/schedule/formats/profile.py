"""A `Profile`: measured costs, and the model and pipeline on which they were measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.formats.json_format import VERSION, costs_from_json, costs_to_json, parsed
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.recomputation import Recompute

_FORMAT = "megatron-zero-bubble profile"

Setting = int | float | str | bool | list[Any] | None
"""A value that JSON knows."""


@dataclass(frozen=True)
class Profile:
    """The measured costs of a run's stages.

    `costs` are in milliseconds and bytes. `noise` is the largest relative spread of a measured time
    (half the interquartile range over the median). `model` holds the settings that the costs depend on. `inside` is the
    most, in bytes, that an operation of each stage needed while it ran, beyond what was held before and after it; it is
    empty where that was not measured.
    """

    placement: Placement
    costs: StageCosts
    noise: float
    model: Mapping[str, Setting]
    inside: tuple[float, ...] = ()

    @property
    def inside_ranks(self) -> tuple[float, ...]:
        """For every rank the most that an operation of any of its stages needed inside; zeros if not measured."""
        ranks = range(self.placement.num_ranks)
        if not self.inside:
            return (0.0,) * len(ranks)
        return tuple(max(self.inside[stage] for stage in self.placement.stages_of(rank)) for rank in ranks)

    def check_fits(
        self, placement: Placement, model: Mapping[str, Setting], recompute: Recompute = Recompute.NONE
    ) -> None:
        """Raise `ScheduleError`, with the first difference, unless the profile fits such a run.

        A setting that a program does not have counts as switched off.
        """
        for name, ours in asdict(placement).items():
            theirs = getattr(self.placement, name)
            if theirs != ours:
                raise ScheduleError(f"the profile was measured with {name} {theirs}, this run has {ours}")
        for name, value in model.items():
            if (self.model.get(name) or None) != (value or None):
                raise ScheduleError(
                    f"the profile was measured with {name} {self.model.get(name)}, this run has {value}"
                )
        if recompute is not Recompute.NONE and not any(self.costs.time_r):
            raise ScheduleError("the profile lacks the costs of recomputation (R): measure it in a run that recomputes")


def profile_to_json(profile: Profile) -> str:
    """The profile as one JSON object, whose `costs` have the form of `costs_to_json`."""
    document = {
        "format": _FORMAT,
        "version": VERSION,
        "placement": asdict(profile.placement),
        "model": dict(profile.model),
        "noise": profile.noise,
        "costs": json.loads(costs_to_json(profile.costs)),
    }
    if profile.inside:
        document["inside"] = list(profile.inside)
    return json.dumps(document, indent=1) + "\n"


def is_profile(text: str) -> bool:
    """Whether the text says of itself that it is a profile."""
    return _FORMAT in text[:200]


def profile_from_json(text: str) -> Profile:
    """The profile that `profile_to_json` wrote. Raises `ScheduleError` for anything else."""
    document = parsed(text, _FORMAT)
    try:
        placement = Placement(**document["placement"])
        costs = costs_from_json(json.dumps(document["costs"]))
        inside = tuple(float(value) for value in document.get("inside", ()))
        profile = Profile(placement, costs, float(document["noise"]), dict(document["model"]), inside)
    except (KeyError, TypeError, ValueError) as error:
        raise ScheduleError(f"the {_FORMAT} is damaged: {error}") from None
    if costs.num_stages != placement.num_stages:
        raise ScheduleError(f"the profile has costs of {costs.num_stages} stages, its placement {placement.num_stages}")
    if inside and (len(inside) != placement.num_stages or not all(0 <= value < math.inf for value in inside)):
        raise ScheduleError(f"the {_FORMAT} is damaged: inside must be {placement.num_stages} numbers of bytes")
    return profile
