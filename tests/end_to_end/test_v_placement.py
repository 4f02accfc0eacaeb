"""Layers placed in a V compute what 1F1B computes: the same losses, and bit for bit the same parameters.

The V's stages are uneven where linear ones are even. Checkpoints are loaded under other placements and partitions.

No dropout, because its random numbers are drawn rank by rank, and no clipping, because the order in which a
norm is summed may differ. `make test` runs one model, `make test-all` those whose layers compute otherwise, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule
from megatron.zero_bubble.schedule.formats import schedule_to_json
from tests.comparison import differences, losses, tensors
from tests.launch import TINY_GPT
from tests.trainings import run_trainings

MICROBATCHES = 4
EXACT = ("--clip-grad", "0", "--attention-dropout", "0", "--hidden-dropout", "0", "--lr-decay-style", "constant")
EVEN_V = ()
UNEVEN_V = ("--pipeline-model-parallel-layout", "Et|tt|t|L")
MODELS = {
    "untied-recomputed": (
        (
            "--untie-embeddings-and-output-weights",
            *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ),
        ("--pipeline-model-parallel-layout", "E|tt|t|tL"),
    ),
    "tied-bf16": (("--bf16",), UNEVEN_V),
    "tied-per-token": (("--calculate-per-token-loss",), EVEN_V),
    "tied-bf16-distributed-optimizer": (("--bf16", "--use-distributed-optimizer"), UNEVEN_V),
    "untied-further-tokens": (
        (
            "--untie-embeddings-and-output-weights",
            *("--mtp-num-layers", "2", "--position-embedding-type", "rope"),
        ),
        ("--pipeline-model-parallel-layout", "E|tt|tt|mmL"),
    ),
}
"""Flags of each model, and of its V, which change no number; the linear stages are even."""
UNEVEN_LINEAR = ("--decoder-first-pipeline-num-layers", "3")
INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")


def all_forwards_first() -> Schedule:
    """A V schedule that no generator makes: every F, then every B, then every W, chunk by chunk."""
    microbatches = range(MICROBATCHES)
    lane = [
        *(Op(OpKind.F, m, chunk) for chunk in (0, 1) for m in microbatches),
        *(Op(OpKind.B, m, chunk) for chunk in (1, 0) for m in microbatches),
        *(Op(OpKind.W, m, chunk) for chunk in (1, 0) for m in microbatches),
    ]
    return Schedule("all-forwards-first", Placement("v", 2, 2), MICROBATCHES, (tuple(lane), tuple(lane)))


def flags(folder: Path, name: str, loaded: str, until: int, *more: str) -> list[str]:
    return [
        *(*TINY_GPT, *EXACT, "--pipeline-model-parallel-size", "2", "--global-batch-size", str(MICROBATCHES)),
        *("--train-iters", str(until), "--save", str(folder / name), *more),
        *(("--load", str(folder / loaded), "--override-opt_param-scheduler") if loaded else ()),
    ]


def trainings_of(folder: Path, model: tuple[str, ...], v: tuple[str, ...], file: Path) -> dict[str, list[str]]:
    """1F1B to iteration 1, from there each schedule to 3, and from 3 to 4 under other placements and partitions.

    ZB-V is planned from measured costs after its first iteration.
    """
    in_v = (*model, *v, "--zero-bubble-schedule", f"file:{file}")
    planned = (*model, *v, "--zero-bubble-schedule", "zb-v", "--zero-bubble-profile-iters", "1", "1")
    return {
        "start": flags(folder, "start", "", 1, *model),
        "1f1b": flags(folder, "1f1b", "start", 3, *model),
        "v": flags(folder, "v", "start", 3, *in_v),
        "zb-v": flags(folder, "zb-v", "start", 3, *planned),
        "1f1b-from-v": flags(folder, "1f1b-from-v", "v", 4, *model, *UNEVEN_LINEAR),
        "v-from-1f1b": flags(folder, "v-from-1f1b", "1f1b", 4, *in_v),
        "interleaved-from-v": flags(folder, "interleaved-from-v", "v", 4, *model, *INTERLEAVED),
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "tied-bf16" else pytest.mark.exhaustive) for name in MODELS],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints and numerics of the trainings of one model."""
    folder = tmp_path_factory.mktemp("v")
    file = folder / "all_forwards_first.json"
    file.write_text(schedule_to_json(all_forwards_first()))
    run_trainings(2, trainings_of(folder, *MODELS[request.param], file), folder)
    return folder


@pytest.mark.parametrize("schedule", ["v", "zb-v"])
def test_a_v_gives_the_losses_parameters_and_moments_of_1f1b(folder: Path, schedule: str) -> None:
    assert losses(folder, schedule) == losses(folder, "1f1b")
    assert len(set(losses(folder, schedule).values())) == 2
    ours, theirs = tensors(folder, schedule, 3), tensors(folder, "1f1b", 3)
    assert differences(ours, theirs) == []
    assert any("exp_avg_sq" in key for key in ours)
    assert differences(theirs, tensors(folder, "start", 1)), "training changes them"


@pytest.mark.parametrize("other", ["1f1b-from-v", "interleaved-from-v"])
def test_a_checkpoint_goes_on_under_any_placement_and_partition(folder: Path, other: str) -> None:
    assert losses(folder, other) == losses(folder, "v-from-1f1b")
    assert differences(tensors(folder, "v-from-1f1b", 4), tensors(folder, other, 4)) == []
