"""Full recomputation as an operation of the schedule gives, byte for byte, the numbers of megatron-core's own.

So does recomputation of what the schedule chooses. Dropout is on, as by default. `make test` runs post-validation whose
every step is rolled back with the R's before it, and a planned schedule; `make test-all` the other precisions, layers,
schedules and kinds of parallelism, in which the same code runs.
"""

from __future__ import annotations

import pytest

from tests.launch import TINY_GPT
from tests.trainings import Trainings


def checkpointed(method: str, num_layers: int) -> tuple[str, ...]:
    return (
        *("--recompute-granularity", "full", "--recompute-method", method),
        *("--recompute-num-layers", str(num_layers)),
    )


EVERY_LAYER = checkpointed("uniform", 1)
COMMON = (
    *(*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--clip-grad", "0.05"),
    *("--train-iters", "6"),
)
MEASURED = ("--zero-bubble-profile-iters", "2", "3")
"""Our runs are planned from what these iterations measure, so that three iterations follow the plan."""
BY_SCHEDULE = (
    "--zero-bubble",
    "--zero-bubble-keep-layout",
    "--zero-bubble-recompute",
    "planned",
    "--zero-bubble-memory-limit",
    "0.7",
)
IN_GROUPS = ("--zero-bubble-schedule", "auto", "--zero-bubble-memory-limit", "0.7")
"""A limit below what one microbatch of a stage holds, with room for one of its two layers."""
TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EXPERTS = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear")
CHUNKS = ("--num-layers", "8", "--num-virtual-stages-per-pipeline-rank", "2")
MODELS = {
    "every layer": EVERY_LAYER,
    "two layers at once, bf16": (*checkpointed("uniform", 2), "--bf16"),
    "three layers at once": checkpointed("uniform", 3),
    "the first layer, fp16": (
        *(*checkpointed("block", 1), "--fp16", "--initial-loss-scale", "1e6", "--hysteresis", "1"),
    ),
    "experts": (*EVERY_LAYER, *EXPERTS),
    "further tokens": (*EVERY_LAYER, "--mtp-num-layers", "2"),
    "chunks, the first layer": (*checkpointed("block", 1), *CHUNKS),
    "chunks, every layer, bf16": (*EVERY_LAYER, *CHUNKS, "--bf16"),
}
ON_FOUR_RANKS = {
    "tensor and sequence parallel": (*EVERY_LAYER, *TENSOR_PARALLEL),
    "tensor and sequence parallel, Llama-like": (
        *(*checkpointed("uniform", 2), *TENSOR_PARALLEL, "--bf16", "--swiglu", "--normalization", "RMSNorm"),
        *("--position-embedding-type", "rope", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    ),
    "expert parallel": (*EVERY_LAYER, *EXPERTS, "--expert-model-parallel-size", "2", "--use-distributed-optimizer"),
    "overlapped reduction": (*EVERY_LAYER, "--overlap-grad-reduce", "--ddp-bucket-size", "4000"),
}
RUNS = {
    "1f1b": ("--zero-bubble-schedule", "1f1b"),
    "zb-h1": ("--zero-bubble-schedule", "zb-h1"),
    "zb-2p": ("--zero-bubble-schedule", "zb-2p"),
    "auto": ("--zero-bubble", "--zero-bubble-keep-layout"),
    "post-validation": ("--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation"),
    "planned": BY_SCHEDULE,
    "in groups": IN_GROUPS,
}
INTERLEAVED = {
    "interleaved-1f1b": ("--zero-bubble-schedule", "interleaved-1f1b"),
    "interleaved-zb": ("--zero-bubble-schedule", "interleaved-zb"),
}
IN_MAKE_TEST = {"post-validation", "planned", "in groups"}


def runs_of(model: str) -> dict[str, tuple[str, ...]]:
    """The flags of our runs of a model, beside those of the model; a planned run gets no flags of recomputation."""
    if model == "further tokens":
        # One microbatch of the last stage, with layers and losses of its own, is 1F1B's peak.
        return {**RUNS, "planned": (*BY_SCHEDULE[:-1], "1")}
    if {**MODELS, **ON_FOUR_RANKS}[model][:6] != EVERY_LAYER and not model.startswith("chunks"):
        # A stage restores both of its layers at once, or keeps one.
        return {**RUNS, "in groups": (*IN_GROUPS[:-1], "1")}
    return INTERLEAVED if model.startswith("chunks") else RUNS


def cover_of(model: str) -> list[str]:
    """The runs of a model that are compared: the planned one, and two others, which differ from model to model.

    Every schedule meets at least three models.
    """
    runs = list(runs_of(model))
    if model.startswith("chunks"):
        return runs
    others, number = [run for run in runs if run != "planned"], 2 * [*MODELS, *ON_FOUR_RANKS].index(model)
    return ["planned", others[number % len(others)], others[(number + 1) % len(others)]]


def training_flags(models: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    trainings = {}
    for model, model_flags in models.items():
        left = list(model_flags[6:])
        trainings[f"base-{model}"] = [*COMMON, *model_flags]
        for run, flags in runs_of(model).items():
            trainings[f"{run}-{model}"] = [*COMMON, *(left if run == "planned" else model_flags), *flags, *MEASURED]
    return trainings


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trainings]:
    """Trainings by the number of ranks; `base-*` run megatron-core's schedule."""
    ranks = {2: MODELS, 4: ON_FOUR_RANKS}
    return {n: Trainings(n, training_flags(models), tmp_path_factory.mktemp("runs")) for n, models in ranks.items()}


def test_post_validation_and_a_planned_schedule_equal_megatron_core(trainings: dict[int, Trainings]) -> None:
    names = [f"{run}-every layer" for run in ("base", *sorted(IN_MAKE_TEST))]
    trainings[2].run(*names)
    base, in_groups, planned, validated = map(trainings[2].numerics, names)
    assert validated == base
    assert planned == base
    assert in_groups == base
    assert "groups of layers in which each stage restores activations: 2, " in trainings[2].printed(names[1])
    for name in names[1:]:
        assert "restored by R (MiB)" in trainings[2].printed(name)


def test_a_stage_may_have_fewer_layers_than_a_block(trainings: dict[int, Trainings]) -> None:
    names = ("base-every layer", "base-three layers at once", "zb-h1-three layers at once")
    trainings[2].run(*names)
    assert len({trainings[2].numerics(name) for name in names}) == 1


@pytest.mark.exhaustive  # the same code in other layers, precisions and orders
@pytest.mark.parametrize(
    ("num_ranks", "model"), [*((2, model) for model in MODELS), *((4, model) for model in ON_FOUR_RANKS)]
)
def test_every_recomputed_model_equals_megatron_cores(
    trainings: dict[int, Trainings], num_ranks: int, model: str
) -> None:
    runs = cover_of(model)
    trainings[num_ranks].run(f"base-{model}", *(f"{run}-{model}" for run in runs))
    base = trainings[num_ranks].numerics(f"base-{model}")
    assert [run for run in runs if trainings[num_ranks].numerics(f"{run}-{model}") != base] == []
