"""A script that calls megatron-core as Megatron-LM does trains the same under schedules of ours.

Trainings with two chunks a rank are exhaustive, because `tests/trainer` compares their schedules. So are those with
further optimizers, whose steps `test_post_validation.py` and `tests/runtime/test_rollback.py` undo, too,
and those with replicas that average, as in `tests/end_to_end/test_hierarchical_sgd.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.layers import layers_of_layout
from tests.changes import NoStepWaits
from tests.jobs import Job
from tests.launch import torchrun
from tests.launcher.script_trainings import CHECKOUT, MeasuredCosts, ScriptTrainings, TorchsMuon, Training, numbers

P2 = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0.5")
"""The gradient norm is above this in every iteration."""
WITH_LOADERS = (*P2, "--num-workers", "2")
SOMETIMES = (*P2, "--log-interval", "3", "--train-iters", "7")
POST_VALIDATION = {"schedule": "zb-2p", "post_validation": True}
SPREAD = {"schedule": "zb-h1", "vocabulary_parallel": "on"}
WHOLE = {"vocabulary_parallel": "off"}
"""Spread over the ranks, which may be chosen, a vocabulary gives other roundings."""
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
"""Layers that the ranks do not divide, which Megatron-LM takes only with a layout or a split of its own."""
UNEVEN = ("--decoder-first-pipeline-num-layers", "4")
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
REPLICAS = ("--pipeline-model-parallel-size", "2", "--optimizer", "sgd", "--clip-grad", "0", "--train-iters", "6")
"""On four ranks, two replicas of a pipeline."""
LENGTHS = (*P2, "--varied-lengths")
PACKED = (*SOMETIMES, "--varied-lengths", "--packed", *RECOMPUTED)
DRAWN = ("--keep-initial-weights", "--hidden-dropout", "0.1", "--seed", "7")
"""Weights and dropout come from random states, and not from the names of the parameters."""
GO_ON = ("--train-iters", "6")
"""For two iterations more than the training whose checkpoint is loaded."""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> ScriptTrainings:
    """Trainings on two ranks."""
    folder = tmp_path_factory.mktemp("launcher")
    planned = {"keep_layout": True, "profile_iters": [1, 2], "timeline": str(folder / "timeline"), "strict": True}
    where_needed = {"recompute": "planned", "memory_limit": "0.7"}
    in_a_v = {**WHOLE, "placement": "v"}
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
        "seeded": Training({"schedule": "zb-h1", "seed_by_layer": True}, (*ODD, *UNEVEN, *DRAWN)),
        "seeded, in a V": Training({"schedule": "zb-v", "seed_by_layer": True}, (*ODD, *UNEVEN, *CHUNKS, *DRAWN)),
        "chosen": Training(WHOLE, (*ODD, *DRAWN)),
        "chosen, a V": Training(in_a_v, (*ODD, *DRAWN, *RECOMPUTED), saves=True, change=MeasuredCosts()),
        "chosen, a V, resumed": Training({}, (*ODD, *DRAWN, *RECOMPUTED, *GO_ON), loads="chosen, a V"),
        "base, uneven": Training(None, (*ODD, *UNEVEN)),
        "zb-v, uneven": Training({"schedule": "zb-v"}, (*ODD, *UNEVEN, *CHUNKS)),
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


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> ScriptTrainings:
    """Trainings on four ranks: gradients reduced, and parameters averaged often and seldom."""
    seldom = {"schedule": "zb-2p", "post_validation": True, "hierarchical_sgd": "4:2"}
    table = {
        "reduced": Training({"schedule": "zb-h1"}, REPLICAS),
        "averaged": Training({"schedule": "zb-h1", "hierarchical_sgd": "1:2"}, REPLICAS),
        "averaged, logged sometimes": Training(
            {"schedule": "zb-h1", "hierarchical_sgd": "1:2"}, (*REPLICAS, "--log-interval", "3")
        ),
        "averaged seldom": Training(seldom, REPLICAS, saves=True),
    }
    return ScriptTrainings(4, table, tmp_path_factory.mktemp("replicas"))


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


def test_seeds_of_layers_draw_the_same_in_an_uneven_v(trainings: ScriptTrainings) -> None:
    ours, theirs = (trainings.numbers(training) for training in ("seeded, in a V", "seeded"))
    assert ours[0:8:2] + ours[8:] == theirs[0:8:2] + theirs[8:]
    assert len(set(ours)) == len(ours)


@pytest.mark.exhaustive
def test_an_uneven_v_gives_the_same_losses(trainings: ScriptTrainings) -> None:
    """The last rank logs the losses that the first computes; norms differ because they are summed in another order."""
    ours, theirs = (trainings.numbers(training) for training in ("zb-v, uneven", "base, uneven"))
    assert ours[0:8:2] + ours[8:] == theirs[0:8:2] + theirs[8:]
    assert [float.fromhex(x) for x in ours[1:8:2]] == pytest.approx([float.fromhex(x) for x in theirs[1:8:2]], rel=1e-6)


def test_costs_are_measured_before_the_script_builds_its_model(trainings: ScriptTrainings) -> None:
    """Every rank has the same costs, of the script's own layers; `test_the_layout_is_chosen` compares the numbers."""
    costs, others = (trainings.costs("chosen, a V", rank) for rank in range(2))
    assert costs == others
    assert len(costs["layers"]) == 7
    layer = costs["layers"][0]
    hidden, vocabulary, sequence = 32, 128, 16
    assert layer["state"] == 16 * (12 * hidden**2 + 13 * hidden), "fp32 with Adam: weight, gradient and two moments"
    assert costs["embedding"]["state"] == 16 * (vocabulary + sequence) * hidden
    assert costs["output"]["state"] == 16 * (vocabulary + 2) * hidden, "a copy of the table, and the final norm"
    assert layer["memory_w"] < 0 < layer["memory_r"] < layer["memory_f"]
    assert costs["time_comm"] > 0


@pytest.mark.parametrize("training", ["chosen", "chosen, a V"])
def test_the_layout_is_chosen_and_built_with_the_same_losses(trainings: ScriptTrainings, training: str) -> None:
    """Losses do not depend on the layout, because the choice gives every layer a seed of its own."""
    said = trainings.log(training, 0)
    assert re.search(r"^ > layout chosen .*2 ranks and 4 microbatches$", said, re.M)
    assert re.search(r"^     Megatron's split, 1f1b  ", said, re.M)
    [flags] = re.findall(r"^     the same layout in another run: (.*)$", said, re.M)
    layout, placement = re.findall(r"layout '?(\S+?)'? --zero-bubble-placement (\w+) --zero-bubble-seed", flags)[0]
    stages = layers_of_layout(layout, 2)
    places = Placement(placement, 2, len(stages) // 2)
    for rank in range(2):
        assert trainings.layers(training, rank) == [stages[stage] for stage in places.stages_of(rank)]
    assert training == "chosen" or placement == "v"
    assert trainings.losses(training) == trainings.losses("seeded")
    assert len(trainings.losses(training)) == 5


def test_a_job_keeps_the_layout_that_was_chosen_for_its_checkpoint(trainings: ScriptTrainings) -> None:
    resumed = "chosen, a V, resumed"
    assert " > layout: that of the checkpoint in --load" in trainings.log(resumed, 0)
    built = [trainings.layers(resumed, rank) for rank in range(2)]
    assert built == [trainings.layers("chosen, a V", rank) for rank in range(2)]
    assert list(map(len, built)) == [2, 2]
    assert sum(map(sum, built)) == 7
    assert len(trainings.numbers(resumed)) > 2


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


@pytest.mark.exhaustive
def test_replicas_that_average_every_iteration_have_the_numbers_of_those_that_reduce_gradients(
    replicas: ScriptTrainings,
) -> None:
    """Up to rounding: six losses, of which the script prints the mean over replicas, and that of the validation."""
    reduced, averaged, seldom = (
        [float.fromhex(loss) for loss in replicas.losses(name)] for name in ("reduced", "averaged", "averaged seldom")
    )
    assert len(reduced) == 7
    assert averaged == pytest.approx(reduced, rel=1e-6)
    assert seldom[0] == reduced[0]
    assert seldom[2:] != pytest.approx(reduced[2:], rel=1e-6)


@pytest.mark.exhaustive
def test_a_log_line_has_the_mean_loss_of_all_replicas_over_its_iterations(replicas: ScriptTrainings) -> None:
    *losses, validation = [float.fromhex(loss) for loss in replicas.losses("averaged")]
    logged = [float.fromhex(loss) for loss in replicas.losses("averaged, logged sometimes")]
    assert logged == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3, validation], rel=1e-6)


@pytest.mark.exhaustive
def test_what_is_saved_is_the_same_on_all_replicas(replicas: ScriptTrainings) -> None:
    """After iteration 6, where replicas that average every fourth have stepped alone twice."""
    replicas.run("averaged seldom")
    saved = replicas.folder / "averaged seldom"
    states = [torch.load(saved / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]
    (_, [model], optimizer, _), (_, [other_model], other_optimizer, _) = states
    weights = [name for name, value in model.items() if isinstance(value, torch.Tensor)]
    assert weights
    assert all(torch.equal(model[name], other_model[name]) for name in weights)
    moments, other_moments = optimizer["state"], other_optimizer["state"]
    assert moments
    for parameter, state in moments.items():
        assert torch.equal(state["momentum_buffer"], other_moments[parameter]["momentum_buffer"])
