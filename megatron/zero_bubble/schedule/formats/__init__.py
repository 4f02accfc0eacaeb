"""Schedules and costs as text: JSON, a CSV grid for people and spreadsheets, and PyTorch's CSV dialect."""

import re

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.formats.grid import schedule_from_csv, schedule_to_csv, schedule_to_grid
from megatron.zero_bubble.schedule.formats.json_format import (
    costs_from_json,
    costs_to_json,
    schedule_from_json,
    schedule_to_json,
)
from megatron.zero_bubble.schedule.formats.profile import (
    Profile,
    Setting,
    is_profile,
    profile_from_json,
    profile_to_json,
)
from megatron.zero_bubble.schedule.formats.pytorch import schedule_from_pytorch_csv, schedule_to_pytorch_csv
from megatron.zero_bubble.schedule.formats.units import units_from_json, units_to_json
from megatron.zero_bubble.schedule.ir import Schedule

__all__ = [
    "Profile",
    "Setting",
    "costs_from_json",
    "costs_from_text",
    "costs_to_json",
    "profile_from_json",
    "profile_to_json",
    "schedule_from_csv",
    "schedule_from_json",
    "schedule_from_pytorch_csv",
    "schedule_from_text",
    "schedule_to_csv",
    "schedule_to_grid",
    "schedule_to_json",
    "schedule_to_pytorch_csv",
    "units_from_json",
    "units_to_json",
]


def schedule_from_text(text: str, name: str) -> Schedule:
    """Read a schedule from text in any format; the first characters of the text decide the format.

    Args:
        text: JSON, a CSV grid, or PyTorch's CSV.
        name: name to give to a schedule from PyTorch's CSV, which contains no name.

    Raises:
        ScheduleError: the text is neither JSON, nor a CSV grid, nor PyTorch's CSV.
    """
    start = text.lstrip()
    if start.startswith(("{", "[")):
        return schedule_from_json(text)
    if re.match('"?schedule"?[,;\t]', start):
        return schedule_from_csv(text)
    return schedule_from_pytorch_csv(text, name=name)


def costs_from_text(text: str) -> StageCosts:
    """Read the costs of stages from the JSON of `costs_to_json` or of `profile_to_json`.

    Raises:
        ScheduleError: the text is neither costs nor a profile in JSON.
    """
    return profile_from_json(text).costs if is_profile(text) else costs_from_json(text)
