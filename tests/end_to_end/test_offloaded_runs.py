"""Activations that go to the host and come back give, byte for byte, the numbers without offload.

Linear placements are compared with megatron-core's own schedule, a V, whose ranks hold other layers, with itself.

Dropout is on and embeddings are tied, as by default; layers have seeds of their own, because in a V the order of the
plan decides else which random numbers they draw. The runs are planned from a profile whose memory and copies a run
has measured, and whose times a test has set, so that the plans need copies on any machine. `make test` runs a V;
`make test-all` other schedules, precisions, features, and what a real run holds.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.zero_bubble.schedule.formats import profile_from_json, profile_to_json
from tests.changes import Change, Run
from tests.launch import TINY_GPT
from tests.trainings import Trainings

LARGER = ("--hidden-size", "64", "--seq-length", "64", "--train-iters", "5")
"""Activations of which most are large enough to be copied."""
COMMON = (
    *(*TINY_GPT, *LARGER, "--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--clip-grad", "0.05"),
    "--zero-bubble-seed-by-layer",
)
OFFLOAD = ("--zero-bubble-offload", "auto")
IN_A_V = ("--zero-bubble-schedule", "zb-v", *OFFLOAD, "--zero-bubble-memory-limit", "0.6")
IN_A_HALF_V = ("--zero-bubble-schedule", "v-half", *OFFLOAD, "--zero-bubble-memory-limit", "0.6")
LINEAR = ("--zero-bubble-schedule", "auto", *OFFLOAD, "--zero-bubble-memory-limit", "1")
MODELS = {
    "plain": (),
    "bf16": ("--bf16",),
    "untied, RMSNorm": ("--untie-embeddings-and-output-weights", "--swiglu", "--normalization", "RMSNorm"),
}
IN_GROUPS = (
    *("--zero-bubble-schedule", "auto", "--zero-bubble-recompute", "planned"),
    *(*OFFLOAD, "--zero-bubble-memory-limit", "0.4"),
)
RUNS = {
    "zb-v": IN_A_V,
    "v-half": IN_A_HALF_V,
    "auto": LINEAR,
    "in groups": IN_GROUPS,
    "post-validation": (*IN_A_V, "--zero-bubble-post-validation"),
}


@dataclass(frozen=True)
class MemoryWritten(Change):
    """Measures memory in every step, and writes the most that each rank holds in one, in bytes."""

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from megatron.zero_bubble.runtime.replanner import Replanner

        collect, most = Replanner._collect, {}

        def note(self, step, ops):
            # Forwards that run again after a wrong step take the place of those that have run.
            changes = {one.op: one.memory_change or 0 for one in ops}.values()
            most[step] = max(accumulate(changes, initial=0))
            path = run.folder / f"{run.name}-memory-{dist.get_rank()}.json"
            path.write_text(json.dumps(most))
            collect(self, step, ops)

        always = mock.patch.object(Replanner, "measures_memory", return_value=True)
        with mock.patch.object(Replanner, "_collect", note), always:
            yield


def measuring(model: str, run: str) -> str:
    return f"measure {run} {model}"


def keeping(model: str, run: str) -> str:
    return f"keep {run} {model}"


def planned(model: str, run: str) -> str:
    return f"{run} {model}"


def training_flags(folder: Path) -> dict[str, tuple[str | Change, ...]]:
    trainings: dict[str, tuple[str | Change, ...]] = {}
    for model, model_flags in MODELS.items():
        trainings[f"base {model}"] = (*COMMON, *model_flags)
        for run, flags in RUNS.items():
            kept = [flag for flag in flags if flag not in OFFLOAD]
            trainings[keeping(model, run)] = (*COMMON, *model_flags, *kept, "--zero-bubble-profile-iters", "0", "0")
            name = planned(model, run)
            profile = str(folder / f"{name}.json")
            window = ("--zero-bubble-profile-iters", "2", "3", "--zero-bubble-profile-output", profile)
            trainings[measuring(model, run)] = (*COMMON, *model_flags, *flags, *window)
            given = ("--zero-bubble-profile-input", profile)
            trainings[name] = (*COMMON, *model_flags, *flags, *given, MemoryWritten())
    return trainings


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("offloaded")
    return Trainings(2, training_flags(folder), folder)


def with_times(path: Path) -> None:
    """Give the stages of a profile equal times, slow messages and R, and copies that take a quarter of F."""
    profile = profile_from_json(path.read_text())
    stages = profile.placement.num_stages
    assert min(profile.costs.memory_d) > 0
    assert min(profile.costs.time_d) > 0
    assert min(profile.costs.time_h) > 0
    equal = dict.fromkeys(("time_f", "time_b", "time_w"), (10.0,) * stages)
    restoring = tuple(20.0 * (time > 0) for time in profile.costs.time_r)
    copies = dict.fromkeys(("time_d", "time_h"), (2.5,) * stages)
    costs = replace(profile.costs, **equal, **copies, time_r=restoring, time_comm=(15.0,) * (stages - 1))
    path.write_text(profile_to_json(replace(profile, costs=costs, noise=0.0)))


def check_runs(trainings: Trainings, model: str, *runs: str) -> None:
    """Run a model with and without copies, and compare numbers and memory."""
    linear = ("auto", "in groups")
    bases = {run: f"base {model}" if run in linear else keeping(model, run) for run in runs}
    trainings.run(*bases.values(), *(measuring(model, run) for run in runs))
    for run in runs:
        with_times(trainings.folder / f"{planned(model, run)}.json")
    trainings.run(*(planned(model, run) for run in runs))
    for run in runs:
        base = trainings.numerics(bases[run])
        assert trainings.numerics(measuring(model, run)) == base
        assert trainings.numerics(planned(model, run)) == base, run
        printed = trainings.printed(planned(model, run))
        found = re.search(r"copied to the host and back: (\d+) of", printed)
        assert found is not None, printed
        assert int(found[1]) > 0
        assert ("groups of layers in which each stage restores activations: 2, 2" in printed) == (run == "in groups")
        predicted = re.search(r"peak activations of each rank \(MiB\): (.*)", printed)
        assert predicted is not None
        for rank, peak in enumerate(predicted[1].split(", ")):
            path = trainings.folder / f"{planned(model, run)}-memory-{rank}.json"
            held = json.loads(path.read_text())
            # Printed with one digit after the point.
            assert held["3"] / 2**20 == pytest.approx(float(peak), rel=0.05, abs=0.05)


def test_a_v_with_copies_equals_one_without(trainings: Trainings) -> None:
    check_runs(trainings, "plain", "zb-v")


@pytest.mark.exhaustive  # the same code in other orders, precisions and layers
@pytest.mark.parametrize(
    ("model", "runs"),
    [
        ("plain", ("v-half", "auto")),
        ("plain", ("in groups", "post-validation")),
        ("bf16", ("zb-v", "auto")),
        ("untied, RMSNorm", ("post-validation", "auto")),
    ],
)
def test_other_schedules_and_models_with_copies_equal_those_without(
    trainings: Trainings, model: str, runs: tuple[str, ...]
) -> None:
    check_runs(trainings, model, *runs)
