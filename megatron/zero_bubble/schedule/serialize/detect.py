"""Reading a schedule whatever its format."""

from __future__ import annotations

from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.serialize.grid import schedule_from_csv
from megatron.zero_bubble.schedule.serialize.json_format import schedule_from_json
from megatron.zero_bubble.schedule.serialize.pytorch import schedule_from_pytorch_csv


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
