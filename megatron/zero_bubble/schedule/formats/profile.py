"""A `Profile`: measured costs, and the model and pipeline on which they were measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron.zero_bubble.schedule.costs import MESSAGE_COSTS, StageCosts
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.formats.json_format import (
    VERSION,
    costs_from_json,
    costs_to_json,
    format_of,
    parsed,
    placement_of,
)
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.recomputation import Recompute

_FORMAT = "megatron-zero-bubble profile"

Setting = int | float | str | bool | list[Any] | None
"""A value that JSON can represent."""


@dataclass(frozen=True)
class Profile:
    """The measured costs of the stages of a run."""

    placement: Placement
    costs: StageCosts
    """Costs in milliseconds and bytes."""
    noise: float
    """Largest relative spread of a measured time: half the interquartile range, divided by the median."""
    model: Mapping[str, Setting]
    """Model settings on which the costs depend."""
    inside: tuple[float, ...] = ()
    """Stage -> largest temporary memory of an operation in bytes: the peak during the operation, minus the larger of
    the memory before and the memory after the operation. Empty if the run measured no temporary memory."""
    messages: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Names and values of the costs in `MESSAGE_COSTS` as they were measured without other load; empty if `costs`
    contains them. In `costs`, they may contain waits that were measured in one order of operations."""

    @property
    def costs_without_waits(self) -> StageCosts:
        """Costs with messages as they were measured without other load, for other orders than the measured one."""
        return replace(self.costs, **self.messages)

    @property
    def inside_ranks(self) -> tuple[float, ...]:
        """Rank -> largest temporary memory of an operation in bytes; zeros if the run measured no temporary memory."""
        inside, ranks = self.inside or (0.0,) * self.placement.num_stages, range(self.placement.num_ranks)
        return tuple(max(inside[stage] for stage in self.placement.stages_of(rank)) for rank in ranks)

    def check_fits(
        self, placement: Placement, model: Mapping[str, Setting], recompute: Recompute = Recompute.NONE
    ) -> None:
        """Check that the profile fits a run.

        If the profile lacks a setting of the run, `check_fits` assumes that the setting was switched off when the
        profile was measured.

        Raises:
            ScheduleError: the profile does not fit the run. The error message names the first difference between the
                profile and the run.
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
    """Write a profile as a JSON object, in which the value of `costs` has the format of `costs_to_json`."""
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
    if profile.messages:
        document["messages"] = {name: list(values) for name, values in profile.messages.items()}
    return json.dumps(document, indent=1) + "\n"


def is_profile(text: str) -> bool:
    """Whether `text` is a JSON object that names the profile format."""
    return format_of(text) == _FORMAT


def profile_from_json(text: str) -> Profile:
    """Read a profile from the JSON of `profile_to_json`.

    Raises:
        ScheduleError: the text is not in the format of `profile_to_json`.
    """
    document = parsed(text, _FORMAT)
    try:
        placement = placement_of({"num_chunks": 1, **document["placement"]})
        costs = costs_from_json(json.dumps(document["costs"]))
        inside = tuple(float(value) for value in document.get("inside", ()))
        given = dict(document.get("messages", {}))
        messages = {name: tuple(map(float, given[name])) for name in MESSAGE_COSTS if name in given}
        replace(costs, **messages)  # raises an error for damaged values now
        profile = Profile(placement, costs, float(document["noise"]), dict(document["model"]), inside, messages)
    except (KeyError, TypeError, ValueError) as error:
        raise ScheduleError(f"the {_FORMAT} is damaged: {error}") from None
    if costs.num_stages != placement.num_stages:
        raise ScheduleError(f"the profile has costs of {costs.num_stages} stages, its placement {placement.num_stages}")
    if not 0 <= profile.noise < math.inf:
        raise ScheduleError(f"the {_FORMAT} is damaged: noise must be at least 0, got {profile.noise}")
    if inside and (len(inside) != placement.num_stages or not all(0 <= value < math.inf for value in inside)):
        raise ScheduleError(f"the {_FORMAT} is damaged: inside must be {placement.num_stages} numbers of bytes")
    return profile
