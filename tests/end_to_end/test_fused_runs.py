"""Plans with fused and separate backwards compute, byte for byte, the numbers of megatron-core's own schedules.

The runs are planned from a profile that a run has measured and in which a test has set the times, so that fused
backwards save time on any machine. All flags that no test is about have their defaults: dropout is on, and embeddings
are tied.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.schedule.formats import profile_from_json, profile_to_json
from tests.launch import TINY_GPT
from tests.trainings import Trainings

COMMON = (*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--train-iters", "6")
MODELS = {
    "plain": (),
    "bf16, overlapped reduction": ("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce"),
    "untied, clipped": ("--untie-embeddings-and-output-weights", "--swiglu", "--clip-grad", "0.05"),
}
PLANNED = ("--zero-bubble", "--zero-bubble-keep-layout", "--zero-bubble-schedule", "auto")
DRAWN = 4
"""The iteration of which a timeline is written."""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder, flags = tmp_path_factory.mktemp("fused"), {}
    for name, model in MODELS.items():
        profile, timelines = str(folder / f"{name}.json"), str(folder / name)
        measured = ("--zero-bubble-profile-iters", "2", "3", "--zero-bubble-profile-output", profile)
        drawn = ("--zero-bubble-timeline", timelines, "--zero-bubble-timeline-iters", str(DRAWN), str(DRAWN))
        flags[f"base {name}"] = (*COMMON, *model)
        flags[f"measured {name}"] = (*COMMON, *model, *PLANNED, *measured)
        flags[f"fused {name}"] = (*COMMON, *model, *PLANNED, "--zero-bubble-profile-input", profile, *drawn)
    return Trainings(2, flags, folder)


def with_cheap_fused_backwards(path: Path) -> None:
    """Give the stages of a profile equal times, and fused backwards that save a fiftieth of the time of W."""
    profile = profile_from_json(path.read_text())
    size = profile.placement.num_stages
    equal = dict.fromkeys(("time_f", "time_b", "time_w"), (10.0,) * size)
    costs = replace(profile.costs, **equal, saved_bw=(0.2,) * size, time_comm=(0.1,) * (size - 1))
    path.write_text(profile_to_json(replace(profile, costs=costs, noise=0.0)))


@pytest.mark.parametrize("name", MODELS)
def test_fused_and_separate_backwards_in_one_step_change_no_number(trainings: Trainings, name: str) -> None:
    trainings.run(f"base {name}", f"measured {name}")
    with_cheap_fused_backwards(trainings.folder / f"{name}.json")
    trainings.run(f"fused {name}")
    assert trainings.numerics(f"measured {name}") == trainings.numerics(f"base {name}")
    assert trainings.numerics(f"fused {name}") == trainings.numerics(f"base {name}")
    timeline = trainings.folder / name / f"iteration_{DRAWN:07d}.trace.json"
    kinds = {event["name"].rstrip("0123456789") for event in json.loads(timeline.read_text())["traceEvents"]}
    assert {"F", "B", "W", "BW"} <= kinds
