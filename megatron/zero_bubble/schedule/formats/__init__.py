"""Schedules and costs as text: JSON (exact), a CSV grid (for eyes and spreadsheets), PyTorch's CSV dialect."""

from megatron.zero_bubble.schedule.formats.detect import costs_from_text, schedule_from_text
from megatron.zero_bubble.schedule.formats.grid import schedule_from_csv, schedule_to_csv, schedule_to_grid
from megatron.zero_bubble.schedule.formats.json_format import (
    costs_from_json,
    costs_to_json,
    schedule_from_json,
    schedule_to_json,
)
from megatron.zero_bubble.schedule.formats.profile import Profile, Setting, profile_from_json, profile_to_json
from megatron.zero_bubble.schedule.formats.pytorch import schedule_from_pytorch_csv, schedule_to_pytorch_csv

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
]
