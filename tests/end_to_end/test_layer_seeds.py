"""With `--zero-bubble-seed-by-layer` a model draws the same weights and the same dropout wherever its layers are.

The losses of four iterations are equal to the last bit only if both are. No clipping, because the order in which a norm
is summed depends on the placement. `make test` compares the kinds of placements, recomputation, a resumed run and
multi-token prediction in one start. Exhaustive are the same comparisons for other models, with post-validation, and
under tensor parallelism.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comparison import losses
from tests.launch import TINY_GPT
from tests.trainings import Trainings, run_trainings

COMMON = [
    *(*TINY_GPT, "--global-batch-size", "4", "--train-iters", "4", "--clip-grad", "0"),
    *("--pipeline-model-parallel-size", "2"),
]
SEEDED = [*COMMON, "--zero-bubble-seed-by-layer"]
V = ("--zero-bubble-schedule", "zb-v", "--pipeline-model-parallel-layout", "Et|tt|t|L")
RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
RUNS = {
    "linear": (),
    "uneven-linear": ("--zero-bubble-schedule", "zb-h1", "--decoder-first-pipeline-num-layers", "3"),
    "v": V,
    "interleaved": CHUNKS,
    "interleaved-zb": ("--zero-bubble-schedule", "interleaved-zb", *CHUNKS),
    "recomputed-by-megatron-core": (*RECOMPUTED, "2"),
    "recomputed-in-a-v": (*V, *RECOMPUTED, "1"),
}
FURTHER = ("--mtp-num-layers", "1")
MODELS = {
    "untied": ("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope", "--swiglu"),
    "further-tokens": FURTHER,
    "untied-further-tokens": (*FURTHER, "--untie-embeddings-and-output-weights"),
    "experts": ("--num-experts", "2", "--disable-bias-linear"),
    "redone-forwards": ("--clip-grad", "0.5"),
}
IN_MAKE_TEST = "untied-further-tokens"
FURTHER_IN_V = ("--pipeline-model-parallel-layout", "Et|tt|t|mL")
REDONE = ("--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("seeds")
    flags = {name: [*SEEDED, *more] for name, more in RUNS.items()}
    flags["stopped"] = [*SEEDED, *V, "--exit-interval", "2", "--save", str(folder / "saved")]
    flags["resumed-elsewhere"] = [*SEEDED, "--load", str(folder / "saved")]
    flags["seeded-by-rank"] = COMMON
    for name, model in MODELS.items():
        other = REDONE if name == "redone-forwards" else (*V, *(FURTHER_IN_V if FURTHER[0] in model else ()))
        flags[name] = [*SEEDED, *model]
        flags[f"{name}-otherwise"] = [*SEEDED, *other, *model]
    return Trainings(2, flags, folder)


def losses_of(trainings: Trainings, name: str) -> dict[int, str]:
    trainings.run(name)
    return losses(trainings.folder, name)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "linear"])
def test_losses_do_not_depend_on_placement_partition_and_recomputation(trainings: Trainings, name: str) -> None:
    assert losses_of(trainings, name) == losses_of(trainings, "linear")


def test_a_run_resumed_under_another_placement_draws_what_it_would_have_drawn(trainings: Trainings) -> None:
    whole = losses_of(trainings, "linear")
    assert losses_of(trainings, "stopped") | losses_of(trainings, "resumed-elsewhere") == whole
    assert len(set(whole.values())) == 4


def test_without_the_flag_each_rank_has_a_seed(trainings: Trainings) -> None:
    assert losses_of(trainings, "seeded-by-rank")[1] != losses_of(trainings, "linear")[1]


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=() if name == IN_MAKE_TEST else pytest.mark.exhaustive) for name in MODELS],
)
def test_other_models_draw_alike_everywhere(trainings: Trainings, model: str) -> None:
    trainings.run(model, f"{model}-otherwise")
    assert losses_of(trainings, model) == losses_of(trainings, f"{model}-otherwise")


@pytest.mark.exhaustive
def test_tensor_and_data_parallel_ranks_draw_alike_everywhere(tmp_path: Path) -> None:
    shapes = {
        "tensor": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        "data": (),
    }
    run_trainings(
        4,
        {
            name + place: [*SEEDED, *shape, *more]
            for name, shape in shapes.items()
            for place, more in (("", ()), ("-v", V))
        },
        tmp_path,
    )
    for name in shapes:
        assert losses(tmp_path, name) == losses(tmp_path, f"{name}-v")
