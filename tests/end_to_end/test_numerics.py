"""The promise: every schedule gives, bit for bit, the numbers of megatron-core's own schedule.

`make test` runs each schedule on two ranks, one of them in bf16, too, and the models that take other ways through the
layers. What is exhaustive is the same code at other sizes: `tests/cli/test_check_ranks.py` compares on four ranks.
"""

from __future__ import annotations

import json
from itertools import combinations, product

import pytest

from tests.launch import DEEPSEEK_V3, TINY_GPT
from tests.trainings import Trainings

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")
PRECISIONS = {"fp32": (), "bf16": ("--bf16",)}
MICROBATCHES = (4, 8)
PLANNED = {
    "auto": ("--zero-bubble", "--zero-bubble-keep-layout"),
    "zb-1p": ("--zero-bubble-schedule", "zb-1p"),
    # From equal costs: at those that it measures, the solver takes its time.
    "optimal": ("--zero-bubble-schedule", "optimal", "--zero-bubble-profile-iters", "0", "0"),
}
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
INTERLEAVED = {
    "base-chunks": (),
    "interleaved-1f1b": ("--zero-bubble-schedule", "interleaved-1f1b"),
    "interleaved-zb": ("--zero-bubble-schedule", "interleaved-zb"),
    "auto-chunks": ("--zero-bubble", "--zero-bubble-keep-layout"),
    "base-no-dropout": NO_DROPOUT,
    "auto-no-dropout": (
        *(*NO_DROPOUT, "--zero-bubble", "--zero-bubble-keep-layout", "--zero-bubble-memory-limit", "0.7"),
    ),
}
CLIPPED = ("--clip-grad", "0.05")
"""The gradient norm is above this in every iteration: the whole model depends on the norm's last bit."""
SCHEDULE_OF_LR = ("--lr-decay-style", "cosine", "--min-lr", "1e-4", "--adam-beta2", "0.95", "--weight-decay", "0.1")
ROTARY = (
    *("--position-embedding-type", "rope", "--rotary-base", "1000000", "--swiglu", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--group-query-attention", "--num-query-groups", "2"),
    *("--untie-embeddings-and-output-weights", "--use-mcore-models", "--sequence-parallel", *NO_DROPOUT),
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--bf16"),
)
SCRIPTS = {
    "gpt3-script": (
        *("--attention-backend", "auto", "--fp16", "--initial-loss-scale", "1e4", "--rampup-batch-size", "2", "1", "9"),
        *("--init-method-std", "0.006", "--lr-warmup-fraction", ".1", "--lr-decay-iters", "8", *SCHEDULE_OF_LR),
    ),
    "llama3-script": (
        *(*ROTARY, *SCHEDULE_OF_LR, "--kv-channels", "16", "--attention-backend", "fused", "--apply-layernorm-1p"),
        *("--lr-decay-iters", "10", "--lr-warmup-iters", "2", "--decoupled-lr", "2e-2"),
        *("--decoupled-min-lr", "2e-3", "--grad-reduce-in-bf16", "--cross-entropy-loss-fusion"),
        *("--calculate-per-token-loss", "--manual-gc", "--manual-gc-interval", "3", "--empty-unused-memory-level", "2"),
        *("--tiktoken-pattern", "v2", "--no-create-attention-mask-in-dataloader", "--no-mmap-bin-files"),
    ),
    "mixtral-script": (
        *(*ROTARY, *SCHEDULE_OF_LR, "--no-masked-softmax-fusion", "--no-position-embedding", "--num-experts", "4"),
        *("--moe-router-topk", "2", "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
        *("--moe-token-dispatcher-type", "alltoall"),
    ),
}
"""What Megatron-LM's example scripts for these models say, as far as a CPU can do it."""
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
    "sequence-balanced-experts": (
        *("--num-experts", "4", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear"),
        *("--moe-router-load-balancing-type", "seq_aux_loss"),
    ),
    "norms-around-zero": ("--apply-layernorm-1p",),
    "deepseek-v3": DEEPSEEK_V3,
    **SCRIPTS,
}
QUICK_MODELS = ("llama-like", "experts", "fp16", "llama3-script", "deepseek-v3")
IN_MAKE_TEST = [*((2, schedule, "fp32", 8) for schedule in SCHEDULES if schedule != "gpipe"), (2, "zb-h1", "bf16", 4)]
CASES = [
    *IN_MAKE_TEST,
    (2, "gpipe", "fp32", 8),
    *((4, schedule, "bf16", 4) for schedule in ("gpipe", "1f1b", "zb-h2")),
    *((4, "zb-h1", precision, m) for precision, m in (("fp32", 4), ("bf16", 8))),
]
"""Ranks, schedule, precision and microbatches: a pairwise cover of all their combinations."""


def flags(num_ranks: int, num_microbatches: int, *more: str) -> list[str]:
    sizes = ["--pipeline-model-parallel-size", str(num_ranks), "--global-batch-size", str(num_microbatches)]
    return [*TINY_GPT, "--log-interval", "1", *sizes, *CLIPPED, *more]


def training_flags(p: int) -> dict[str, list[str]]:
    """All trainings with this many pipeline ranks; `base-*` are megatron-core's own."""
    trainings = {}
    for (precision, precision_flags), m in product(PRECISIONS.items(), MICROBATCHES):
        trainings[f"base-{precision}-{m}"] = flags(p, m, *precision_flags)
        for schedule in SCHEDULES:
            trainings[f"{schedule}-{precision}-{m}"] = flags(p, m, *precision_flags, "--zero-bubble-schedule", schedule)
    for schedule, ours in PLANNED.items():
        trainings[schedule] = flags(p, 8, *ours)
    for schedule, ours in INTERLEAVED.items():
        trainings[schedule] = flags(p, 8, "--num-virtual-stages-per-pipeline-rank", "2", *ours, "--num-layers", "8")
    for model, model_flags in MODELS.items():
        trainings[f"base-{model}"] = flags(p, 4, *model_flags)
        trainings[f"planned-{model}"] = flags(p, 4, *model_flags, "--zero-bubble", "--zero-bubble-keep-layout")
    return trainings


@pytest.fixture(scope="module")
def numerics(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trainings]:
    """Trainings by the number of pipeline ranks."""
    return {p: Trainings(p, training_flags(p), tmp_path_factory.mktemp("numerics")) for p in (2, 4)}


RANKS = pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.exhaustive)])


def test_the_cases_are_a_pairwise_cover() -> None:
    choices = ((2, 4), SCHEDULES, PRECISIONS, MICROBATCHES)
    for i, j in combinations(range(len(choices)), 2):
        assert {(case[i], case[j]) for case in CASES} == {(a, b) for a in choices[i] for b in choices[j]}


@pytest.mark.parametrize(
    ("p", "schedule", "precision", "num_microbatches"),
    [pytest.param(*case, marks=() if case in IN_MAKE_TEST else pytest.mark.exhaustive) for case in CASES],
)
def test_every_schedule_equals_megatron_core(
    numerics: dict[int, Trainings], p: int, schedule: str, precision: str, num_microbatches: int
) -> None:
    ours, megatrons = f"{schedule}-{precision}-{num_microbatches}", f"base-{precision}-{num_microbatches}"
    numerics[p].run(ours, megatrons)
    assert numerics[p].numerics(ours) == numerics[p].numerics(megatrons)


@pytest.mark.parametrize(
    ("p", "schedule"),
    [
        pytest.param(*case, marks=() if case == (2, "auto") else pytest.mark.exhaustive)
        for case in (*product((2,), PLANNED), (4, "zb-1p"))
    ],
)
def test_planned_schedules_equal_megatron_cores(numerics: dict[int, Trainings], p: int, schedule: str) -> None:
    """Each schedule is planned in the middle of the run, except the optimal one."""
    assert numerics[p].numerics(schedule) == numerics[p].numerics("base-fp32-8")


@pytest.mark.parametrize(
    ("schedule", "p"),
    [
        *(("interleaved-zb", 2), ("auto-chunks", 2)),
        *(
            pytest.param(name, p, marks=pytest.mark.exhaustive)
            for name, p in product(("interleaved-1f1b", "auto-no-dropout"), (2, 4))
        ),
    ],
)
def test_interleaved_schedules_equal_megatron_cores(numerics: dict[int, Trainings], schedule: str, p: int) -> None:
    """Ranks have two chunks, with dropout. Without dropout `auto` chooses its own order of forwards."""
    base = "base-no-dropout" if schedule == "auto-no-dropout" else "base-chunks"
    assert numerics[p].numerics(schedule) == numerics[p].numerics(base)


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model in QUICK_MODELS else pytest.mark.exhaustive) for model in MODELS]
)
def test_other_models_equal_megatron_core(numerics: dict[int, Trainings], model: str) -> None:
    """Each model trains on two ranks, with a schedule that is planned in the middle of the run."""
    numerics[2].run(f"planned-{model}", f"base-{model}")
    assert numerics[2].numerics(f"planned-{model}") == numerics[2].numerics(f"base-{model}")


@RANKS
def test_the_numbers_are_those_of_a_training(numerics: dict[int, Trainings], p: int) -> None:
    """Ten iterations, clipping active in all, a loss that moves, parameters that change: the files can differ."""
    lines = [json.loads(line) for line in numerics[p].numerics("base-fp32-8").splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, 11))
    assert all(float.fromhex(line["grad_norm"]) > 0.05 for line in lines)
    assert len({line["lm_loss"] for line in lines}) == 10
    assert len({digest for line in lines for digest in line["parameters"]}) == 10 * len(lines[0]["parameters"])
    assert numerics[p].numerics("base-bf16-4") != numerics[p].numerics("base-fp32-8")
