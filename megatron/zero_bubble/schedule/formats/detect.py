"""Reading schedules and costs whatever their format."""

from __future__ import annotations

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.formats.grid import schedule_from_csv
from megatron.zero_bubble.schedule.formats.json_format import costs_from_json, schedule_from_json
from megatron.zero_bubble.schedule.formats.profile import is_profile, profile_from_json
from megatron.zero_bubble.schedule.formats.pytorch import schedule_from_pytorch_csv
from megatron.zero_bubble.schedule.ir import Schedule


def schedule_from_text(text: str, name: str) -> Schedule:
    """The schedule in `text`; its first characters tell the format.

    `name` is given to a schedule in PyTorch's dialect, which has none. Raises `ScheduleError`.
    """
    start = text.lstrip()
    if start.startswith(("{", "[")):
        return schedule_from_json(text)
    if start.startswith("schedule,"):
        return schedule_from_csv(text)
    return schedule_from_pytorch_csv(text, name=name)


def costs_from_text(text: str) -> StageCosts:
    """The costs in a file of costs, or in a profile that a run has measured. Raises `ScheduleError`."""
    return profile_from_json(text).costs if is_profile(text) else costs_from_json(text)
