"""Under megatron-core's other kinds of parallelism too, numbers are those of its own schedule, byte for byte.

`make test` runs tensor with sequence parallelism and two instances of the distributed optimizer under one schedule,
`test_matrix.py` the overlapped distributed optimizer and `test_numerics.py` experts. The layouts that are exhaustive
combine the same parts, or change attention alone, as context parallelism does.
"""

from __future__ import annotations

import json
from itertools import product

import pytest

from tests.launch import TINY_GPT, Trainings

COMMON = [
    *TINY_GPT,
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--clip-grad", "0.5", "--train-iters", "5"),
]
BUCKETS = ("--ddp-bucket-size", "4000")
"""Several buckets on the first stage, so that some reduce while W's are still to come."""
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2"),
    "tp2-sp": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "tp2-sp-rms": (
        *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--normalization", "RMSNorm", "--swiglu"),
        *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--bf16"),
    ),
    "dp2": (),
    "dp2-distributed-optimizer": ("--use-distributed-optimizer", "--bf16"),
    "dp2-two-instances": ("--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"),
    "dp2-overlap-grad-reduce": ("--overlap-grad-reduce", *BUCKETS),
    "dp2-overlap-both": (
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", *BUCKETS),
        "--untie-embeddings-and-output-weights",
    ),
    "dp2-ep2": (
        *("--expert-model-parallel-size", "2", "--num-experts", "4", "--moe-aux-loss-coeff", "0.01"),
        *("--disable-bias-linear", "--swiglu", "--use-distributed-optimizer"),
    ),
}
NO_DROPOUT = (
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2", "--overlap-grad-reduce", *BUCKETS),
)
LAYOUTS["dp2-ep2-alltoall"] = (*LAYOUTS["dp2-ep2"], "--moe-token-dispatcher-type", "alltoall")
LAYOUTS["cp2"] = ("--context-parallel-size", "2", *NO_DROPOUT)
SCHEDULES = ("zb-h1", "zb-2p")


QUICK_LAYOUTS = ("tp2-sp", "dp2-two-instances")
TOGETHER = [f"{which}-{layout}" for which in ("base", "zb-2p") for layout in QUICK_LAYOUTS]
"""What `make test` compares, in one start of four ranks."""


@pytest.fixture(scope="module")
def numerics(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Four ranks, two of them a pipeline; `base-*` are megatron-core's own."""
    trainings = {"without-cp": [*COMMON, *NO_DROPOUT]}
    for layout, flags in LAYOUTS.items():
        trainings[f"base-{layout}"] = [*COMMON, *flags]
        for schedule in SCHEDULES:
            trainings[f"{schedule}-{layout}"] = [*COMMON, *flags, "--zero-bubble-schedule", schedule]
    return Trainings(4, trainings, tmp_path_factory.mktemp("parallelism"), together=TOGETHER)


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        pytest.param(*case, marks=() if case[1] in QUICK_LAYOUTS and case[0] == "zb-2p" else pytest.mark.exhaustive)
        for case in product(SCHEDULES, LAYOUTS)
    ],
)
def test_numerics_equal_megatron_core(numerics: Trainings, schedule: str, layout: str) -> None:
    numerics.run(f"{schedule}-{layout}", f"base-{layout}")
    assert numerics.numerics(f"{schedule}-{layout}") == numerics.numerics(f"base-{layout}")


@pytest.mark.exhaustive
def test_context_parallelism_computes_what_one_rank_computes(numerics: Trainings) -> None:
    """Losses and norms are equal up to rounding, because sums have another order."""
    numerics.run("without-cp", "base-cp2")
    whole, parts = (
        [json.loads(line) for line in numerics.numerics(name).splitlines()] for name in ("without-cp", "base-cp2")
    )
    for key in ("lm_loss", "grad_norm"):
        expected = [float.fromhex(line[key]) for line in whole]
        assert [float.fromhex(line[key]) for line in parts] == pytest.approx(expected, rel=1e-4)


@pytest.mark.exhaustive
def test_the_layouts_are_really_different(numerics: Trainings) -> None:
    files = {layout: numerics.numerics(f"base-{layout}") for layout in LAYOUTS}
    assert files["tp2"] != files["dp2"]
    assert files["dp2"] != files["dp2-distributed-optimizer"]
