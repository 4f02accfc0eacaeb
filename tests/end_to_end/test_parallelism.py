"""Under megatron-core's kinds of parallelism, numbers are those of its own schedule, byte for byte.

Every layout of ranks meets both embeddings, both precisions and both schedules, and so does every pair of these: a
pairwise cover of all their combinations. ZB-V, which places layers elsewhere, runs in one cell of most layouts. It
starts from weights of megatron-core's and must reach the losses and parameters that megatron-core reaches, without
clipping (the order in which a norm is summed differs) and dropout (drawn rank by rank).

`make test` runs tensor with sequence parallelism, two instances of the distributed optimizer and the overlapped
distributed optimizer. The other layouts combine the same parts, or change attention alone, as context parallelism does.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.changes import Change
from tests.comparison import differences, losses, printed_losses, tensors
from tests.launch import TINY_GPT
from tests.trainings import Trainings, run_trainings


class Layout(NamedTuple):
    num_ranks: int
    flags: tuple[str, ...]


PP2 = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "4000")
"""Several buckets on the first stage, so that some reduce while W's are still to come."""
SHARDED = "--use-distributed-optimizer"
INSTANCES = (SHARDED, "--num-distributed-optimizer-instances", "2")
EXPERTS = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear", "--swiglu")
SHARED_EXPERTS = (*EXPERTS, "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall")
TP2 = ("--tensor-model-parallel-size", "2")
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
ROTARY = (
    *(*NO_DROPOUT, "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2", *OVERLAP),
)
LAYOUTS = {
    "tp2": Layout(4, (*PP2, *TP2)),
    "tp2-sp": Layout(
        4,
        (*PP2, *TP2, "--sequence-parallel", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    ),
    "dp2": Layout(4, PP2),
    "dp2-distributed-optimizer": Layout(4, (*PP2, SHARDED)),
    "dp2-two-instances": Layout(4, (*PP2, *INSTANCES)),
    "dp2-overlap-grad-reduce": Layout(4, (*PP2, *OVERLAP)),
    "dp2-overlap-both": Layout(4, (*PP2, *OVERLAP, SHARDED, "--overlap-param-gather")),
    "dp4-two-instances-overlap-both": Layout(8, (*PP2, *OVERLAP, *INSTANCES, "--overlap-param-gather")),
    "tp2-dp2": Layout(8, (*PP2, *TP2, *OVERLAP)),
    "pp4": Layout(4, ("--pipeline-model-parallel-size", "4", "--global-batch-size", "8", "--num-layers", "8")),
    "dp2-ep2": Layout(4, (*PP2, "--expert-model-parallel-size", "2", *EXPERTS, SHARDED)),
    "dp2-ep2-alltoall": Layout(
        4, (*PP2, "--expert-model-parallel-size", "2", *EXPERTS, SHARDED, "--moe-token-dispatcher-type", "alltoall")
    ),
    "cp2": Layout(4, (*PP2, "--context-parallel-size", "2", *ROTARY)),
    "cp2-ep2": Layout(4, (*PP2, "--context-parallel-size", "2", *ROTARY, *SHARED_EXPERTS)),
    "tp2-ep2": Layout(
        4, (*PP2, *TP2, "--sequence-parallel", "--expert-tensor-parallel-size", "1", *SHARED_EXPERTS, SHARDED)
    ),
}
EMBEDDINGS = {"tied": (), "untied": ("--untie-embeddings-and-output-weights",)}
PRECISIONS = {"fp32": (), "bf16": ("--bf16",)}
COVER = (
    (("tied", "fp32", "zb-h1"), ("untied", "bf16", "zb-2p")),
    (("tied", "bf16", "zb-2p"), ("untied", "fp32", "zb-h1")),
    (("tied", "bf16", "zb-h1"), ("untied", "fp32", "zb-2p")),
    (("tied", "fp32", "zb-2p"), ("untied", "bf16", "zb-h1")),
)
"""Cells that layouts have in turn; in each pair of cells every choice differs."""
CELLS = [(layout, *cell) for number, layout in enumerate(LAYOUTS) for cell in COVER[number % len(COVER)]]
QUICK = [
    ("tp2-sp", "tied", "bf16", "zb-2p"),
    ("dp2-two-instances", "untied", "bf16", "zb-2p"),
    ("dp2-overlap-both", "untied", "fp32", "zb-2p"),
]
NO_V = ("dp2-ep2", "dp2-ep2-alltoall", "cp2", "cp2-ep2", "tp2-ep2", "dp4-two-instances-overlap-both", "tp2-dp2")
"""ZB-V does not run in these.

test_layer_seeds.py has experts in a V, attention knows nothing of stages, and eight ranks combine layouts of four.
"""
EXACT = ("--clip-grad", "0", *NO_DROPOUT, "--lr-decay-style", "constant")


def flags_of(layout: str, embeddings: str, precision: str) -> list[str]:
    return [*TINY_GPT, *LAYOUTS[layout].flags, *EMBEDDINGS[embeddings], *PRECISIONS[precision]]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trainings]:
    """Trainings by the number of ranks; `base-*` are megatron-core's own."""
    folder = tmp_path_factory.mktemp("parallelism")
    plans: dict[int, dict[str, list[str | Change]]] = {4: {}, 8: {}}
    for layout, embeddings, precision, schedule in CELLS:
        plan, cell = plans[LAYOUTS[layout].num_ranks], f"{layout}-{embeddings}-{precision}"
        flags = flags_of(layout, embeddings, precision)
        plain = [*flags, "--train-iters", "4", "--clip-grad", "0.5"]
        plan[f"base-{cell}"] = [*plain]
        plan[f"{schedule}-{cell}"] = [*plain, "--zero-bubble-schedule", schedule]
        exact, load = [*flags, *EXACT], ("--load", str(folder / f"start-{cell}"), "--finetune")
        plan[f"start-{cell}"] = [*exact, "--train-iters", "1", "--save", str(folder / f"start-{cell}")]
        for name, more in {"1f1b": (), "zb-v": ("--zero-bubble-schedule", "zb-v")}.items():
            save = ("--save", str(folder / f"{name}-{cell}"))
            plan[f"{name}-{cell}"] = [*exact, "--train-iters", "2", *load, *save, *more]
    plans[4]["without-cp"] = [*TINY_GPT, *PP2, *ROTARY, "--train-iters", "4", "--clip-grad", "0.5"]
    return {num_ranks: Trainings(num_ranks, plan, folder) for num_ranks, plan in plans.items()}


def test_the_cells_are_a_pairwise_cover() -> None:
    choices = (LAYOUTS, EMBEDDINGS, PRECISIONS, ("zb-h1", "zb-2p"))
    for i, j in combinations(range(len(choices)), 2):
        assert {(cell[i], cell[j]) for cell in CELLS} == {(a, b) for a in choices[i] for b in choices[j]}
    assert {*QUICK} <= {*CELLS}


@pytest.mark.parametrize(
    ("layout", "embeddings", "precision", "schedule"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.exhaustive) for cell in CELLS],
)
def test_numerics_equal_megatron_core(
    trainings: dict[int, Trainings], layout: str, embeddings: str, precision: str, schedule: str
) -> None:
    of_ranks, cell = trainings[LAYOUTS[layout].num_ranks], f"{layout}-{embeddings}-{precision}"
    of_ranks.run(f"base-{cell}", f"{schedule}-{cell}")
    assert of_ranks.numerics(f"{schedule}-{cell}") == of_ranks.numerics(f"base-{cell}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "embeddings", "precision"),
    [cell[:3] for cell in CELLS if cell[3] == "zb-h1" and cell[0] not in NO_V],
)
def test_a_v_gives_the_losses_and_parameters_of_1f1b(
    trainings: dict[int, Trainings], layout: str, embeddings: str, precision: str
) -> None:
    of_ranks, cell = trainings[LAYOUTS[layout].num_ranks], f"{layout}-{embeddings}-{precision}"
    names = [f"{name}-{cell}" for name in ("start", "1f1b", "zb-v")]
    of_ranks.run(*names)
    assert losses(of_ranks.folder, names[2]) == losses(of_ranks.folder, names[1])
    before, theirs, ours = (
        {key: value for key, value in tensors(of_ranks.folder, name, step).items() if not key.startswith("optimizer.")}
        for name, step in zip(names, (1, 2, 2), strict=True)
    )
    assert differences(ours, theirs) == []
    assert any(not before[key].equal(value) for key, value in ours.items()), "training changes them"


@pytest.mark.exhaustive
def test_context_parallelism_computes_what_one_rank_computes(trainings: dict[int, Trainings]) -> None:
    """Losses and norms are equal up to rounding, because sums have another order."""
    whole, parts = (
        [json.loads(line) for line in trainings[4].numerics(name).splitlines()]
        for name in ("without-cp", "base-cp2-tied-fp32")
    )
    for key in ("lm_loss", "grad_norm"):
        expected = [float.fromhex(line[key]) for line in whole]
        assert [float.fromhex(line[key]) for line in parts] == pytest.approx(expected, rel=1e-4)


@pytest.mark.exhaustive
def test_the_layouts_are_really_different(trainings: dict[int, Trainings]) -> None:
    layouts = ("tp2", "dp2-distributed-optimizer", "cp2")
    assert len({trainings[4].numerics(f"base-{layout}-tied-fp32") for layout in layouts}) == len(layouts)


OVERLAPPED = {
    "1f1b": (),
    "zb-2p": ("--zero-bubble-schedule", "zb-2p"),
    "zb-v": ("--zero-bubble-schedule", "zb-v"),
    "interleaved-zb": ("--zero-bubble-schedule", "interleaved-zb", "--num-virtual-stages-per-pipeline-rank", "2"),
    "shards": ("--zero-bubble-schedule", "zb-2p", "--zero-bubble-vocabulary-parallel", "on"),
}


@pytest.mark.exhaustive
def test_forwards_wait_for_the_parameters_that_they_need(tmp_path: Path) -> None:
    """`--log-numerics` gathers all parameters after every step, so that the tests above gather none during forwards."""
    common = [*TINY_GPT, *PP2, *EXACT, "--train-iters", "6", "--log-interval", "1", SHARDED, *EMBEDDINGS["untied"]]
    plan = {}
    for name, flags in OVERLAPPED.items():
        plan[name] = [*common, "--num-layers", "8", *flags]
        plan[f"{name}, overlapped"] = [*plan[name], *OVERLAP, "--overlap-param-gather"]
    printed = run_trainings(4, plan, tmp_path, unlogged=tuple(plan))
    found = {name: printed_losses(text) for name, text in printed.items()}
    for name in OVERLAPPED:
        assert len(found[name]) == 6
        assert found[f"{name}, overlapped"] == found[name], name
