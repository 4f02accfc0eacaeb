"""A script that calls megatron-core as Megatron-LM does trains the same under schedules of ours.

Trainings with two chunks a rank are exhaustive, because `tests/trainer` compares their schedules. So are those with
further optimizers, whose steps `test_post_validation.py` and `tests/runtime/test_rollback.py` undo, too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.changes import NoStepWaits
from tests.jobs import Job
from tests.launch import torchrun
from tests.launcher.script_flags import CHUNKS, DRAWN, GO_ON, RECOMPUTED, UNCLIPPED, UNEVEN
from tests.launcher.script_trainings import CHECKOUT, ScriptTrainings, TorchsMuon, Training, numbers

P2 = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0.5")
"""The gradient norm is above this in every iteration."""
WITH_LOADERS = (*P2, "--num-workers", "2")
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
UNTIED = ("--untie-embeddings-and-output-weights", "--overlap-grad-reduce")
HYBRID = (
    "--hybrid-override-pattern",
    "*--*-*",
    "--num-layers",
    "6",
    "--spec",
    "megatron.zero_bubble.mcore.hybrid_spec",
)
DEFERRING = (*HYBRID[:-1], "tests.mcore.deferring_spec")
"""With layers that defer W as Transformer Engine's do, where the configuration says so."""
LENGTHS = (*P2, "--varied-lengths")
PACKED = (*SOMETIMES, "--varied-lengths", "--packed", *RECOMPUTED)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> ScriptTrainings:
    """Trainings on two ranks."""
    folder = tmp_path_factory.mktemp("launcher")
    planned = {"keep_layout": True, "profile_iters": [1, 2], "timeline": str(folder / "timeline"), "strict": True}
    where_needed = {"recompute": "planned", "memory_limit": "0.7"}
    table = {
        "base": Training(None, P2, saves=True),
        "zb-h1": Training({"schedule": "zb-h1"}, P2, saves=True),
        "base again": Training(None, P2),
        "base with loaders": Training(None, WITH_LOADERS),
        "base resumed": Training(None, (*P2, *GO_ON), loads="zb-h1"),
        "recomputed where needed, resumed": Training(where_needed, (*P2, *GO_ON), loads="base"),
        "offloaded": Training(
            {"schedule": "auto", "memory_limit": "0.7", "offload": "auto", "profile_iters": [1, 2]}, P2
        ),
        "base, untied": Training(None, (*P2, *UNTIED)),
        "recomputed, untied": Training({"schedule": "zb-2p"}, (*P2, *UNTIED, *RECOMPUTED)),
        "base, lengths": Training(None, LENGTHS),
        "planned, lengths": Training({**planned, "microbatch_order": "data"}, LENGTHS),
        "ordered": Training({**POST_VALIDATION, "profile_iters": [1, 2]}, PACKED),
        "base, streams": Training(None, (*P2, "--streams", "by lengths")),
        "zb-2p, streams": Training({"schedule": "zb-2p"}, (*P2, "--streams")),
        "base, packed": Training(None, PACKED),
        "post-validated, packed": Training(
            {**POST_VALIDATION, "microbatch_order": "data"}, PACKED, saves=True, change=NoStepWaits()
        ),
        "post-validated, waiting": Training({**POST_VALIDATION, "microbatch_order": "data"}, PACKED),
        "base, drawn": Training(None, (*UNCLIPPED, *DRAWN)),
        "spread": Training(SPREAD, (*UNCLIPPED, *DRAWN)),
        "base, hybrid": Training(None, (*P2, *HYBRID)),
        "zb-2p, hybrid": Training({"schedule": "zb-2p"}, (*P2, *HYBRID)),
        "base, hybrid, drawn": Training(None, (*UNCLIPPED, *HYBRID, *DRAWN)),
        "spread, hybrid": Training(SPREAD, (*UNCLIPPED, *HYBRID, *DRAWN)),
        "seeded, hybrid": Training({"schedule": "zb-h1", "seed_by_layer": True}, (*UNCLIPPED, *HYBRID, *DRAWN)),
        "seeded, hybrid, uneven": Training(
            {"schedule": "zb-2p", "seed_by_layer": True}, (*UNCLIPPED, *HYBRID, *DRAWN, *UNEVEN)
        ),
        "base, deferring": Training(None, (*P2, *DEFERRING)),
        "zb-h1, deferring": Training({"schedule": "zb-h1"}, (*P2, *DEFERRING)),
        "base, two chunks": Training(None, (*P2, *CHUNKS)),
        "interleaved-zb": Training({"schedule": "interleaved-zb"}, (*P2, *CHUNKS)),
    }
    muon = {"change": TorchsMuon()}
    table["base, Muon"] = Training(None, (*SOMETIMES, "--optimizer", "muon"), **muon)
    table["post-validated, Muon"] = Training(POST_VALIDATION, (*SOMETIMES, "--optimizer", "muon"), **muon)
    for name, optimizer in OPTIMIZERS.items():
        table[f"base, {name}"] = Training(None, (*SOMETIMES, *optimizer))
        table[f"post-validated, {name}"] = Training(POST_VALIDATION, (*SOMETIMES, *optimizer), change=NoStepWaits())
    return ScriptTrainings(2, table, folder)


@pytest.mark.parametrize(
    ("training", "same"),
    [
        ("zb-h1", "base"),
        ("offloaded", "base"),
        ("recomputed where needed, resumed", "base resumed"),
        ("recomputed, untied", "base, untied"),
        ("planned, lengths", "base, lengths"),
        ("zb-2p, streams", "base, streams"),
        ("post-validated, packed", "base, packed"),
        ("post-validated, waiting", "base, packed"),
        ("zb-2p, hybrid", "base, hybrid"),
        ("zb-h1, deferring", "base, deferring"),
        pytest.param("interleaved-zb", "base, two chunks", marks=pytest.mark.exhaustive),
    ],
)
def test_numbers_are_those_of_the_script_alone(trainings: ScriptTrainings, training: str, same: str) -> None:
    expected = trainings.numbers(same)
    assert trainings.numbers(training) == expected


def test_copies_to_the_host_are_measured_before_they_are_planned(trainings: ScriptTrainings) -> None:
    said = trainings.log("offloaded", 0)
    for column in ("D (ms)", "H (ms)", "copied by D (MiB)"):
        assert column in said


@pytest.mark.parametrize(("training", "same"), [("spread", "base, drawn"), ("spread, hybrid", "base, hybrid, drawn")])
def test_a_vocabulary_in_shards_gives_the_same_numbers_but_for_rounding(
    trainings: ScriptTrainings, training: str, same: str
) -> None:
    ours, expected = (list(map(float.fromhex, trainings.numbers(name))) for name in (training, same))
    assert len(ours) == 9
    assert ours == pytest.approx(expected, rel=1e-5)
    assert ours != expected


@pytest.mark.parametrize("training", ["zb-2p, hybrid", "zb-h1, deferring"])
def test_a_hybrid_model_defers_all_its_w(trainings: ScriptTrainings, training: str) -> None:
    said = trainings.log(training, 0)
    assert "\n > W is deferred for 100.0% of the weights, without embeddings, norms and biases\n" in said
    assert "not split" not in said


def test_a_hybrid_model_draws_the_same_wherever_its_layers_are(trainings: ScriptTrainings) -> None:
    ours, theirs = (trainings.numbers(name) for name in ("seeded, hybrid, uneven", "seeded, hybrid"))
    assert ours[0:8:2] + ours[8:] == theirs[0:8:2] + theirs[8:]
    assert trainings.layers("seeded, hybrid, uneven", 0) != trainings.layers("seeded, hybrid", 0)
    assert len(set(ours)) == len(ours)


def test_steps_are_undone(trainings: ScriptTrainings) -> None:
    """Gradients are clipped by a norm that no rank's own gradients have, so that a step is taken and undone."""
    assert trainings.undone("post-validated, packed") > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_steps_of_any_optimizer_are_undone(trainings: ScriptTrainings, optimizer: str) -> None:
    name = f"post-validated, {optimizer}"
    assert trainings.numbers(name) == trainings.numbers(f"base, {optimizer}")
    assert trainings.undone(name) > 0


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_the_steps_of_muon_are_undone(trainings: ScriptTrainings) -> None:
    """The script's optimizer is the chain of Muon and of Adam, for which megatron-core calls a hooked function."""
    assert trainings.numbers("post-validated, Muon") == trainings.numbers("base, Muon")
    assert trainings.undone("post-validated, Muon") > 0


def test_a_checkpoint_of_one_layout_keeps_megatrons(trainings: ScriptTrainings) -> None:
    said = trainings.log("recomputed where needed, resumed", 0)
    assert " > layout: Megatron's, because the checkpoint in --load" in said
    assert "layout chosen" not in said


def test_a_checkpoint_goes_on_either_way(trainings: ScriptTrainings) -> None:
    """A training goes on alone from a checkpoint of ours, and under a schedule of ours from one without."""
    assert trainings.numbers("zb-h1") == trainings.numbers("base"), "the checkpoints are the same"
    assert trainings.numbers("base resumed") == trainings.numbers("recomputed where needed, resumed")
    assert len(trainings.numbers("base resumed")) == 5


def test_the_script_is_itself_again_after_disable(trainings: ScriptTrainings) -> None:
    trainings.run("base", "planned, lengths", "spread")
    log = trainings.log("base again")
    assert numbers(log) == trainings.numbers("base")
    assert "idle" not in log


def test_the_numbers_are_those_of_a_training(trainings: ScriptTrainings) -> None:
    """Clipping in every iteration, different losses, and settings that make a difference: the files can differ."""
    base = trainings.numbers("base")
    assert len(base) == 9
    assert len(set(base)) == 9
    assert all(float.fromhex(norm) > 0.5 for norm in base[1:8:2])
    assert base != trainings.numbers("base, untied")


def test_the_idle_share_follows_the_script_s_own_fields(trainings: ScriptTrainings) -> None:
    lines = trainings.log("planned, lengths").splitlines()
    iterations = [line for line in lines if "] iteration " in line]
    percent = r"\d+\.\d\d%"
    idle = f" idle: {percent} \\| imbalance: {percent} \\| bubble rate: {percent} \\|"
    assert re.search(rf"grad norm: \S+ \|{idle}$", iterations[0])
    assert re.search(rf"\|{idle} predicted: {percent} \|$", iterations[3])
    assert not [line for line in lines if "validation" in line and "idle" in line]


def test_the_training_ends_with_a_summary(trainings: ScriptTrainings) -> None:
    """Costs are measured in the second iteration; the line of the third has the planning in its time."""
    lines = trainings.log("planned, lengths").splitlines()
    (summary,) = (line for line in lines if line.startswith(" > iterations "))
    milliseconds = r"\d+\.\d ms"
    times = rf"{milliseconds} each, {milliseconds} of it in the pipeline, [\d.]+ predicted; bubble rate"
    assert re.match(rf" > iterations 4 to 4: {times}", summary)
    assert lines.index(summary) > max(at for at, line in enumerate(lines) if "] iteration " in line)


def test_an_order_that_is_planned_for_lengths_changes_no_more_than_the_rounding_of_sums(
    trainings: ScriptTrainings,
) -> None:
    """Microbatches come in the order of the data until costs are measured, in the second iteration."""
    ordered, base = (list(map(float.fromhex, trainings.numbers(name))) for name in ("ordered", "base, packed"))
    assert ordered == pytest.approx(base, rel=1e-4)
    fields = [line.partition("microbatch order: ")[2] for line in trainings.log("ordered").splitlines()]
    said = [field for field in fields if field]
    assert len(said) == 2
    assert all(
        re.fullmatch(r"\d\.\d\d times as fast, planned in \d+\.\d ms, not hidden in \d of \d steps \|", field)
        for field in said
    )


def test_start_up_plan_and_timeline_are_those_of_our_own_trainer(trainings: ScriptTrainings) -> None:
    said = trainings.log("planned, lengths", 0)
    assert " > pipeline schedule: auto" in said
    assert " > W is deferred for 100.0% of the weights" in said
    assert " > zero-bubble plan; times measured up to step 2" in said
    assert (trainings.folder / "timeline" / "iteration_0000003.html").is_file()


@pytest.mark.exhaustive  # test_main_endings.py starts the command line, too
def test_the_command_line_does_the_same_and_leaves_no_process(trainings: ScriptTrainings, tmp_path: Path) -> None:
    """Nor do the loaders' workers stay, although post-validation or a signal handler may still refer to them."""
    flags = ("--zero-bubble-cpu", "--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation")
    script = (str(CHECKOUT / "pretrain_small.py"), *WITH_LOADERS, "--exit-signal-handler")
    job = Job(torchrun(2, "-m", "megatron.zero_bubble", *flags, *script), tmp_path)
    try:
        job.wait_until(lambda: "validation loss" in job.output)
    finally:
        status, left, _ = job.end(60.0)
    assert (status, left) == (0, []), job.errors
    assert numbers(job.output) == trainings.numbers("base with loaders")
