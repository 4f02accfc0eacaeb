"""The promise: every schedule gives, bit for bit, the numbers of megatron-core's own schedule."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from tests.launch import TINY_GPT, run_trainings

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")
PRECISIONS = {"fp32": (), "bf16": ("--bf16",)}
MICROBATCHES = (4, 8)
PLANNED = {
    "auto": ("--zero-bubble",),
    "zb-1p": ("--zero-bubble-schedule", "zb-1p"),
    # From equal costs: at those that it measures, the solver takes its time.
    "optimal": ("--zero-bubble-schedule", "optimal", "--zero-bubble-profile-iters", "0", "0"),
}
INTERLEAVED = ("base-chunks", "interleaved-1f1b", "interleaved-zb")
CLIPPED = ("--clip-grad", "0.05")
"""The gradient norm is above this in every iteration: the whole model depends on the norm's last bit."""
MODELS = {
    "untied": ("--untie-embeddings-and-output-weights",),
    "llama-like": (
        *("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
        *("--group-query-attention", "--num-query-groups", "2", "--untie-embeddings-and-output-weights"),
    ),
    "experts": ("--num-experts", "4", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear"),
    "unclipped": ("--clip-grad", "0"),
    "fp16": ("--fp16", "--initial-loss-scale", "1e6", "--hysteresis", "1"),
    "per-token-loss": ("--calculate-per-token-loss",),
    "recompute-selective": ("--recompute-granularity", "selective"),
    "recompute-full": (
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        "--bf16",
    ),
    "recompute-block": (
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "block",
        "--recompute-num-layers",
        "1",
    ),
}


def flags(num_ranks: int, num_microbatches: int, *more: str) -> list[str]:
    sizes = ["--pipeline-model-parallel-size", str(num_ranks), "--global-batch-size", str(num_microbatches)]
    return [*TINY_GPT, *sizes, *CLIPPED, *more]


@pytest.fixture(scope="module", params=[2, 4], ids=["p2", "p4"])
def numerics(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The numerics files of all trainings with this many pipeline ranks; `base-*` are megatron-core's own."""
    p, folder = request.param, tmp_path_factory.mktemp("numerics")
    trainings = {}
    for (precision, precision_flags), m in product(PRECISIONS.items(), MICROBATCHES):
        trainings[f"base-{precision}-{m}"] = flags(p, m, *precision_flags)
        for schedule in SCHEDULES:
            trainings[f"{schedule}-{precision}-{m}"] = flags(p, m, *precision_flags, "--zero-bubble-schedule", schedule)
    for schedule, ours in PLANNED.items():
        trainings[schedule] = flags(p, 8, *ours)
    for schedule in INTERLEAVED:
        named = () if schedule == "base-chunks" else ("--zero-bubble-schedule", schedule)
        trainings[schedule] = flags(p, 8, "--num-virtual-stages-per-pipeline-rank", "2", *named, "--num-layers", "8")
    run_trainings(p, trainings, folder)
    return folder


@pytest.fixture(scope="module")
def model_numerics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other models, on two ranks, with a schedule that is planned in the middle of the run."""
    folder = tmp_path_factory.mktemp("models")
    trainings = {}
    for model, model_flags in MODELS.items():
        trainings[f"base-{model}"] = flags(2, 4, *model_flags)
        trainings[f"planned-{model}"] = flags(2, 4, *model_flags, "--zero-bubble")
    run_trainings(2, trainings, folder)
    return folder


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_megatron_core(
    numerics: Path, schedule: str, precision: str, num_microbatches: int
) -> None:
    ours = (numerics / f"{schedule}-{precision}-{num_microbatches}.jsonl").read_bytes()
    megatrons = (numerics / f"base-{precision}-{num_microbatches}.jsonl").read_bytes()
    assert ours == megatrons


@pytest.mark.parametrize("schedule", PLANNED)
def test_planned_schedules_equal_megatron_cores(numerics: Path, schedule: str) -> None:
    """Planned in the middle of the run, but for the optimal one."""
    assert (numerics / f"{schedule}.jsonl").read_bytes() == (numerics / "base-fp32-8.jsonl").read_bytes()


@pytest.mark.parametrize("schedule", INTERLEAVED[1:])
def test_interleaved_schedules_equal_megatron_cores(numerics: Path, schedule: str) -> None:
    """Two model chunks a rank, with dropout."""
    assert (numerics / f"{schedule}.jsonl").read_bytes() == (numerics / "base-chunks.jsonl").read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_other_models_equal_megatron_core(model_numerics: Path, model: str) -> None:
    planned = (model_numerics / f"planned-{model}.jsonl").read_bytes()
    assert planned == (model_numerics / f"base-{model}.jsonl").read_bytes()


def test_the_numbers_are_those_of_a_training(numerics: Path) -> None:
    """Ten iterations, clipping active in all, a loss that moves, parameters that change: the files can differ."""
    lines = [json.loads(line) for line in (numerics / "base-fp32-8.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, 11))
    assert all(float.fromhex(line["grad_norm"]) > 0.05 for line in lines)
    assert len({line["lm_loss"] for line in lines}) == 10
    assert len({digest for line in lines for digest in line["parameters"]}) == 10 * len(lines[0]["parameters"])
    assert (numerics / "base-fp32-4.jsonl").read_bytes() != (numerics / "base-fp32-8.jsonl").read_bytes()
