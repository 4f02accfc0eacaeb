"""Flags of a run that is planned, with files of profiles and schedules for them."""

from __future__ import annotations

from pathlib import Path

from megatron.zero_bubble.schedule import Schedule, StageCosts
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json, schedule_to_json
from tests import checked_flags
from tests.checked_flags import checked_job

PLANNED = {"--zero-bubble": None, "--global-batch-size": "16"}
KEPT: dict[str, str | None] = {"--zero-bubble-keep-layout": None}
"""Keeps the layout: without this flag a profile of another layout is not refused, but used to choose a layout."""


def refusal(changes: dict[str, str | None]) -> str:
    """The one line with which these flags of a planned run are refused."""
    return checked_flags.refusal({**PLANNED, **changes})


def profile_of(changes: dict[str, str | None], path: Path, *, has_cuda: bool = False) -> str:
    """A file with the profile of a run with these changes."""
    num_ranks = int(changes.get("--pipeline-model-parallel-size") or 4)
    job = checked_job({**PLANNED, **changes}, world_size=num_ranks, has_cuda=has_cuda)
    profile = Profile(job.placement, StageCosts.uniform(job.placement.num_stages), 0.0, job.flags.model)
    path.write_text(profile_to_json(profile))
    return str(path)


def schedule_file(schedule: Schedule, path: Path) -> dict[str, str | None]:
    path.write_text(schedule_to_json(schedule))
    return {"--zero-bubble-schedule": f"file:{path}"}
