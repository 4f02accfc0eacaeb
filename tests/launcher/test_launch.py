"""A script that calls megatron-core as Megatron-LM does trains the same under schedules of ours.

The trainings of `make test` run in one job, which several tests read. Exhaustive, and jobs of their own, are those with
two chunks a rank, whose schedules `tests/training` compares, those of further optimizers, whose steps
`tests/training/test_post_validation.py` and `tests/runtime/test_rollback.py` undo, too, and those of replicas that
average, as in `tests/training/test_hierarchical_sgd.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megatron.zero_bubble.job.layers import layers_of_layout
from megatron.zero_bubble.schedule import Placement
from tests.launch import ROOT, run

CHECKOUT = ROOT / "tests" / "launcher" / "checkout"
P2 = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0.5")
"""The gradient norm is above this in every iteration."""
SOMETIMES = (*P2, "--log-interval", "3", "--train-iters", "7")
POST_VALIDATION = {"schedule": "zb-2p", "post_validation": True}
SPREAD = {"schedule": "zb-h1", "vocabulary_parallel": "on"}
OPTIMIZERS = {
    "AdamW": ("--optimizer", "adamw"),
    "Adam": ("--optimizer", "adam"),
    "SGD": ("--optimizer", "sgd", "--clip-grad", "1.5"),
    "SGD without momentum": ("--optimizer", "sgd", "--sgd-momentum", "0", "--clip-grad", "1.5"),
    "Adagrad": ("--optimizer", "adagrad"),
}
RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
UNTIED = ("--untie-embeddings-and-output-weights", "--overlap-grad-reduce")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
UNCLIPPED = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0", "--num-layers", "6")
"""Across placements the order of adding up the norm differs, and nothing else."""
ODD = (*UNCLIPPED, "--num-layers", "7")
"""Layers that the ranks do not divide, which Megatron-LM takes only with a layout."""
UNEVEN = ("--decoder-first-pipeline-num-layers", "3")
REPLICAS = ("--pipeline-model-parallel-size", "2", "--optimizer", "sgd", "--clip-grad", "0", "--train-iters", "6")
"""On four ranks, two replicas of a pipeline."""
LENGTHS = (*P2, "--varied-lengths")
PACKED = (*SOMETIMES, "--varied-lengths", "--packed", *RECOMPUTED)
DRAWN = ("--keep-initial-weights", "--hidden-dropout", "0.1", "--seed", "7")
"""Weights and dropout come from random states, and not from the names of the parameters."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of log lines a training; those without settings ran with megatron-core's own schedule."""
    folder = tmp_path_factory.mktemp("launcher")
    ours, theirs, plain, chosen = (str(folder / name) for name in ("ours", "theirs", "plain", "chosen"))
    first, rest = ("--train-iters", "2"), ("--train-iters", "4")
    trainings = {
        "base": (None, P2),
        "zb-h1": ({"schedule": "zb-h1"}, P2),
        "recomputed": ({"schedule": "zb-2p"}, (*P2, *RECOMPUTED)),
        "recomputed-where-needed": ({"keep_layout": True, "recompute": "planned", "memory_limit": "0.7"}, P2),
        "base-untied": (None, (*P2, *UNTIED)),
        "zb-2p-untied": ({"schedule": "zb-2p"}, (*P2, *UNTIED)),
        "chosen": ({}, (*UNCLIPPED, *DRAWN)),
        "chosen-v": ({"placement": "v"}, (*UNCLIPPED, *DRAWN)),
        "saved-in-a-v": ({"placement": "v"}, (*ODD, *DRAWN, *first, "--save", chosen)),
        "resumed-in-it": ({}, (*ODD, *DRAWN, *rest, "--load", chosen)),
        "planned": (
            {"keep_layout": True, "profile_iters": [1, 2], "timeline": str(folder / "timeline"), "strict": True},
            P2,
        ),
        "seeded": ({"schedule": "zb-h1", "seed_by_layer": True}, (*UNCLIPPED, *DRAWN)),
        "seeded-in-a-v": ({"schedule": "zb-v", "seed_by_layer": True}, (*UNCLIPPED, *CHUNKS, *UNEVEN, *DRAWN)),
        "measured": ({"schedule": "zb-h1", "measures": True}, (*UNCLIPPED, *DRAWN, *RECOMPUTED)),
        "not-measured": ({"schedule": "zb-h1"}, (*UNCLIPPED, *DRAWN, *RECOMPUTED)),
        "base-drawn": (None, (*UNCLIPPED, *DRAWN)),
        "spread": (SPREAD, (*UNCLIPPED, *DRAWN)),
        "base-again": (None, P2),
        "base-lengths": (None, LENGTHS),
        "lengths": ({"keep_layout": True, "profile_iters": [1, 2]}, LENGTHS),
        "base-packed": (None, PACKED),
        "packed": (POST_VALIDATION, PACKED),
        "base-logged-sometimes": (None, (*SOMETIMES, "--save", plain)),
        "post-validated": (POST_VALIDATION, (*SOMETIMES, "--save", plain)),
        "saved-by-ours": ({"schedule": "zb-h1"}, (*P2, *first, "--save", ours)),
        "resumed-by-theirs": (None, (*P2, *rest, "--load", ours)),
        "saved-by-theirs": (None, (*P2, *first, "--save", theirs)),
        "resumed-with-layout": ({}, (*P2, *rest, "--load", theirs)),
        "resumed-by-ours": ({"schedule": "zb-h1"}, (*P2, *rest, "--load", theirs)),
    }
    for name in (ours, theirs, plain, chosen):
        Path(name).mkdir()
    run_in_turn(trainings, folder)
    return folder


def run_in_turn(trainings: dict[str, tuple], folder: Path, num_ranks: int = 2) -> None:
    (folder / "plan.json").write_text(json.dumps(trainings))
    result = run(num_ranks, ROOT / "tests" / "launcher" / "enabled_in_turn.py", str(folder / "plan.json"), timeout=400)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]


@pytest.fixture(scope="module")
def chunk_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of log lines a training: those with two chunks a rank, and what they must equal."""
    folder = tmp_path_factory.mktemp("chunks")
    trainings = {
        "base-unclipped": (None, UNCLIPPED),
        "zb-v": ({"schedule": "zb-v"}, (*UNCLIPPED, *CHUNKS, *UNEVEN)),
        "base-chunks": (None, (*P2, *CHUNKS)),
        "interleaved-zb": ({"schedule": "interleaved-zb"}, (*P2, *CHUNKS)),
    }
    run_in_turn(trainings, folder)
    return folder


@pytest.fixture(scope="module")
def optimizer_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of log lines a training: each optimizer with and without post-validation."""
    folder, trainings = tmp_path_factory.mktemp("optimizers"), {}
    for name, more in OPTIMIZERS.items():
        trainings[f"base-{name}"] = (None, (*SOMETIMES, *more))
        trainings[f"post-validated-{name}"] = (POST_VALIDATION, (*SOMETIMES, *more))
    run_in_turn(trainings, folder)
    return folder


@pytest.fixture(scope="module")
def replica_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of log lines a training: gradients reduced, and parameters averaged often and seldom."""
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "saved").mkdir()
    seldom = {"schedule": "zb-2p", "post_validation": True, "hierarchical_sgd": "4:2"}
    trainings = {
        "reduced": ({"schedule": "zb-h1"}, REPLICAS),
        "averaged": ({"schedule": "zb-h1", "hierarchical_sgd": "1:2"}, REPLICAS),
        "averaged-seldom": (seldom, (*REPLICAS, "--save", str(folder / "saved"))),
    }
    run_in_turn(trainings, folder, 4)
    return folder


def numbers(log: str) -> list[str]:
    """Loss and gradient norm of every iteration, and the validation loss, to the last bit."""
    return re.findall(r"(?:lm loss|grad norm|lm loss value): (\S+)", log)


def numbers_of(logs: Path, training: str) -> list[str]:
    return numbers((logs / f"{training}.1.txt").read_text())


@pytest.mark.parametrize(
    ("training", "same"),
    [
        ("zb-h1", "base"),
        ("zb-2p-untied", "base-untied"),
        ("planned", "base"),
        ("recomputed", "base"),
        ("recomputed-where-needed", "base"),
        ("post-validated", "base-logged-sometimes"),
        ("lengths", "base-lengths"),
        ("packed", "base-packed"),
    ],
)
def test_numbers_are_those_of_the_script_alone(logs: Path, training: str, same: str) -> None:
    assert numbers_of(logs, training) == numbers_of(logs, same)


def test_a_vocabulary_in_shards_gives_the_same_numbers_but_for_rounding(logs: Path) -> None:
    ours, expected = (list(map(float.fromhex, numbers_of(logs, name))) for name in ("spread", "base-drawn"))
    assert len(ours) == 9
    assert ours == pytest.approx(expected, rel=1e-5)
    assert ours != expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_steps_of_any_optimizer_are_undone(optimizer_logs: Path, optimizer: str) -> None:
    """Gradients are clipped by a norm that no rank's own gradients have, so that a step is taken and undone."""
    name = f"post-validated-{optimizer}"
    assert numbers_of(optimizer_logs, name) == numbers_of(optimizer_logs, f"base-{optimizer}")
    assert sum(int((optimizer_logs / f"{name}.{rank}.undone").read_text()) for rank in range(2)) > 0


@pytest.mark.exhaustive
def test_numbers_of_two_chunks_a_rank_are_those_of_the_script_alone(chunk_logs: Path) -> None:
    assert numbers_of(chunk_logs, "interleaved-zb") == numbers_of(chunk_logs, "base-chunks")


def test_seeds_of_layers_draw_the_same_in_an_uneven_v(logs: Path) -> None:
    ours, theirs = (numbers_of(logs, training) for training in ("seeded-in-a-v", "seeded"))
    assert ours[0:8:2] + ours[8:] == theirs[0:8:2] + theirs[8:]
    assert len(set(ours)) == len(ours)


@pytest.mark.exhaustive
def test_an_uneven_v_gives_the_same_losses(chunk_logs: Path) -> None:
    """The last rank logs the losses that the first computes; norms differ because they are summed in another order."""
    ours, theirs = (numbers_of(chunk_logs, training) for training in ("zb-v", "base-unclipped"))
    assert ours[0:8:2] + ours[8:] == theirs[0:8:2] + theirs[8:]
    assert [float.fromhex(x) for x in ours[1:8:2]] == pytest.approx([float.fromhex(x) for x in theirs[1:8:2]], rel=1e-6)


def test_costs_are_measured_before_the_script_builds_its_model(logs: Path) -> None:
    """Every rank has the same costs, of the script's own layers, and the training's numbers do not change."""
    costs, others = (json.loads((logs / f"measured.{rank}.costs").read_text()) for rank in range(2))
    assert costs == others
    assert len(costs["layers"]) == 6
    layer = costs["layers"][0]
    hidden, vocabulary, sequence = 32, 128, 16
    assert layer["state"] == 16 * (12 * hidden**2 + 13 * hidden), "fp32 with Adam: weight, gradient and two moments"
    assert costs["embedding"]["state"] == 16 * (vocabulary + sequence) * hidden
    assert costs["output"]["state"] == 16 * (vocabulary + 2) * hidden, "a copy of the table, and the final norm"
    assert layer["memory_w"] < 0 < layer["memory_r"] < layer["memory_f"]
    assert costs["time_comm"] > 0
    assert numbers_of(logs, "measured") == numbers_of(logs, "not-measured")


@pytest.mark.parametrize("training", ["chosen", "chosen-v"])
def test_the_layout_is_chosen_and_built_with_the_same_losses(logs: Path, training: str) -> None:
    """Losses do not depend on the layout, because the choice gives every layer a seed of its own."""
    said = (logs / f"{training}.0.txt").read_text()
    assert re.search(r"^ > layout chosen .*2 ranks and 4 microbatches$", said, re.M)
    assert re.search(r"^     Megatron's split, 1f1b  ", said, re.M)
    [flags] = re.findall(r"^     the same layout in another run: (.*)$", said, re.M)
    layout, placement = re.findall(r"layout '?(\S+?)'? --zero-bubble-placement (\w+) --zero-bubble-seed", flags)[0]
    stages = layers_of_layout(layout, 2)
    places = Placement(placement, 2, len(stages) // 2)
    for rank in range(2):
        built = json.loads((logs / f"{training}.{rank}.layers").read_text())
        assert built == [stages[stage] for stage in places.stages_of(rank)]
    assert training == "chosen" or placement == "v"
    losses, same = (
        re.findall(r"loss(?: value)?: (\S+)", (logs / f"{name}.1.txt").read_text()) for name in (training, "seeded")
    )
    assert losses == same
    assert len(losses) == 5


def test_a_job_keeps_the_layout_that_was_chosen_for_its_checkpoint(logs: Path) -> None:
    said = (logs / "resumed-in-it.0.txt").read_text()
    assert " > layout: that of the checkpoint in --load" in said
    for rank in range(2):
        built = [(logs / f"{name}.{rank}.layers").read_text() for name in ("saved-in-a-v", "resumed-in-it")]
        assert built[0] == built[1]
        assert len(json.loads(built[0])) == 2
    built = [json.loads((logs / f"resumed-in-it.{rank}.layers").read_text()) for rank in range(2)]
    assert sum(map(sum, built)) == 7
    assert len(numbers_of(logs, "resumed-in-it")) > 2


def test_a_checkpoint_of_one_layout_keeps_megatrons(logs: Path) -> None:
    said = (logs / "resumed-with-layout.0.txt").read_text()
    assert " > layout: Megatron's, because the checkpoint in --load" in said
    assert "layout chosen" not in said
    assert numbers_of(logs, "resumed-with-layout") == numbers_of(logs, "resumed-by-ours")


def test_the_script_is_itself_again_after_disable(logs: Path) -> None:
    log = (logs / "base-again.1.txt").read_text()
    assert numbers(log) == numbers_of(logs, "base")
    assert "idle" not in log


@pytest.mark.parametrize("who", ["ours", "theirs"])
def test_a_checkpoint_goes_on_either_way(logs: Path, who: str) -> None:
    other = {"ours": "theirs", "theirs": "ours"}[who]
    saved, resumed = numbers_of(logs, f"saved-by-{who}"), numbers_of(logs, f"resumed-by-{other}")
    # Each ends with a validation.
    assert saved[:-1] == numbers_of(logs, "base")[:4]
    assert len(resumed) == 5
    assert numbers_of(logs, "resumed-by-theirs") == numbers_of(logs, "resumed-by-ours")


def test_the_numbers_are_those_of_a_training(logs: Path) -> None:
    """Clipping in every iteration, different losses, and settings that make a difference: the files can differ."""
    base = numbers_of(logs, "base")
    assert len(base) == 9
    assert len(set(base)) == 9
    assert all(float.fromhex(norm) > 0.5 for norm in base[1:8:2])
    assert base != numbers_of(logs, "base-untied")


def test_the_idle_share_follows_the_script_s_own_fields(logs: Path) -> None:
    lines = (logs / "planned.1.txt").read_text().splitlines()
    iterations = [line for line in lines if "] iteration " in line]
    percent = r"\d+\.\d\d%"
    idle = f" idle: {percent} \\| imbalance: {percent} \\| bubble rate: {percent} \\|"
    assert re.search(rf"grad norm: \S+ \|{idle}$", iterations[0])
    assert re.search(rf"\|{idle} predicted: {percent} \|$", iterations[3])
    assert not [line for line in lines if "validation" in line and "idle" in line]


def test_start_up_plan_and_timeline_are_those_of_our_own_trainer(logs: Path) -> None:
    said = (logs / "planned.0.txt").read_text()
    assert " > pipeline schedule: auto" in said
    assert "with W deferred" in said
    assert " > zero-bubble plan; times measured up to step 2" in said
    assert (logs / "timeline" / "iteration_0000003.html").is_file()


@pytest.mark.exhaustive  # test_launcher_endings.py starts the command, too
def test_the_command_line_does_the_same(logs: Path) -> None:
    flags = ["--zero-bubble-cpu", str(CHECKOUT / "pretrain_small.py"), *P2, "--zero-bubble-schedule", "zb-h1"]
    result = run(2, "-m", "megatron.zero_bubble", *flags, timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    assert numbers(result.stdout) == numbers_of(logs, "base")


@pytest.mark.exhaustive
def test_replicas_that_average_every_iteration_have_the_numbers_of_those_that_reduce_gradients(
    replica_logs: Path,
) -> None:
    """Up to rounding: six losses, of which the script prints the mean over replicas, and that of the validation."""
    reduced, averaged, seldom = (
        [float.fromhex(number) for number in re.findall(r"lm loss(?: value)?: (\S+)", log.read_text())]
        for log in (replica_logs / f"{name}.3.txt" for name in ("reduced", "averaged", "averaged-seldom"))
    )
    assert len(reduced) == 7
    assert averaged == pytest.approx(reduced, rel=1e-6)
    assert seldom[0] == reduced[0]
    assert seldom[2:] != pytest.approx(reduced[2:], rel=1e-6)


@pytest.mark.exhaustive
def test_what_is_saved_is_the_same_on_all_replicas(replica_logs: Path) -> None:
    """After iteration 6, where replicas that average every fourth have stepped alone twice."""
    states = [torch.load(replica_logs / "saved" / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]
    (_, [model], optimizer, _), (_, [other_model], other_optimizer, _) = states
    weights = [name for name, value in model.items() if isinstance(value, torch.Tensor)]
    assert weights
    assert all(torch.equal(model[name], other_model[name]) for name in weights)
    moments, other_moments = optimizer["state"], other_optimizer["state"]
    assert moments
    for parameter, state in moments.items():
        assert torch.equal(state["momentum_buffer"], other_moments[parameter]["momentum_buffer"])
