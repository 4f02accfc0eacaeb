"""A benchmark compares the times, predictions and losses of trainings that take turns in rounds."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tiny_benchmark import SIZE, TINY, arguments

from benchmarks.train import peers
from megatron.zero_bubble.cli.benchmark import rounds
from megatron.zero_bubble.cli.benchmark.arguments import LAYOUT, PATTERN
from megatron.zero_bubble.cli.benchmark.contestants import BASELINE, CHUNKS_FLAG
from megatron.zero_bubble.cli.benchmark.training_results import bootstrap_interval, loss_agreement, train_table
from megatron.zero_bubble.cli.benchmark.training_turn import Turn, read_log
from megatron.zero_bubble.cli.benchmark_command import main
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import Placement, StageCosts, simulate
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from tests.mistakes import one_line_mistake


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*SIZE, "--", *TINY, "--no-such-flag"], "--no-such-flag"),
        ([*SIZE, "--schedule", "zb-h9", "--", *TINY], "zb-h9"),
        ([*SIZE, "--schedule", "zb-h1 --zero-bubble-memory-limit x", "--", *TINY], "--zero-bubble-memory-limit"),
        ([*SIZE, "--schedule", "chosen --zero-bubble-placement u", "--", *TINY], "--zero-bubble-placement"),
        ([*SIZE, "--schedule", "interleaved-zb", "--num-chunks", "3", "--", *TINY], "--num-layers 4"),
        ([*SIZE, "--warmup", "8", "--", *TINY], "--warmup: must be a multiple of --interval 5"),
        ([*SIZE, "--warmup", "5", "--", *TINY], "--warmup: must be at least 7"),
        ([*SIZE, "--", *TINY, "--train-iters", "5"], "--train-iters: not allowed after --"),
        ([*SIZE, "--", *TINY, "--train-iters=5"], "--train-iters: not allowed after --"),
        ([*SIZE, "--", *TINY, "--zero-bubble-schedule", "zb-2p"], "--zero-bubble-schedule: not allowed after --"),
        ([*SIZE, "--", *TINY, CHUNKS_FLAG, "2"], f"{CHUNKS_FLAG}: not allowed after --"),
        ([*SIZE, "--schedule", "zb-v", "--", *TINY, LAYOUT, "Et|(t|)*2tL"], f"{LAYOUT}: Et|(t|)*2tL is not allowed"),
        ([*SIZE, "--schedule", "zb-v", "--", *TINY, PATTERN, "*|-|*|-"], f"{PATTERN}: *|-|*|- is not allowed"),
        ([*SIZE, "--schedule", "zb-h1 --train-iters 5", "--", *TINY], "--schedule: --train-iters not allowed in"),
        ([*SIZE, "--schedule", 'zb-h1 "x', "--", *TINY], "--schedule: expected words as in a shell, got 'zb-h1 \"x'"),
        ([*SIZE, "--baseline-flags", '"', "--", *TINY], "--baseline-flags: expected words as in a shell"),
        ([*SIZE, "--launch", "srum -n 2", "--", *TINY], "argument --launch: srum is not a command of this machine"),
        ([*SIZE, "--launch", "", "--", *TINY], "--launch: expected at least one word, got ''"),
        ([*SIZE[:2], "--", *TINY], "--num-microbatches is required with --pipeline-size"),
        (["--num-chunks", "2", "--", *TINY], "--num-chunks: needs --pipeline-size or --schedule"),
        (["--", *TINY], "--pipeline-model-parallel-size: must be at least 2 after --, got 1"),
        (["--", *TINY, "--pipeline-model-parallel-size", "2", "--no-such-flag"], "--no-such-flag"),
        (
            ["--", *TINY, "--pipeline-model-parallel-size", "2", "--zero-bubble-placement", "u"],
            "--zero-bubble-placement",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(flags, words, capsys):
    assert words in one_line_mistake(main, flags, capsys)


@pytest.fixture
def figures(monkeypatch):
    """Three rounds without trainings, on a machine that slows down: each takes 100 ms longer than the last."""
    pace = {"zb-h1": 0.5, "1F1B": 2.0}
    calls = Counter()

    def turn(command, environment, warmup, timeout):
        if "GPipe" in command:
            raise RuntimeError("no memory left")
        words = tuple(word for word in command if word != command[-1])
        calls[words] += 1
        name = next((word for word in pace if word in command), "others")
        milliseconds = 100 * pace.get(name, 1.0) * calls[words]
        return Turn((milliseconds - 1, milliseconds, milliseconds + 9), (), None, None, 2.0**20)

    monkeypatch.setattr(rounds, "take_turn", turn)
    return rounds.compare_trainings(given := arguments("--rounds", "3", "--schedule", "zb-h1"), tuple(peers(given)))


def test_ratios_are_taken_within_rounds(capsys, figures):
    by_name = {one.contestant.name: one for one in figures}
    assert "torch GPipe" not in by_name
    assert capsys.readouterr().err.count("torch GPipe left out: no memory left") == 1
    ours = by_name["zb-h1"]
    assert ours.rounds == (50, 100, 150)
    assert (by_name[BASELINE].ratio, ours.ratio, by_name["torch 1F1B"].ratio) == pytest.approx((1, 2, 0.5))
    document = ours.as_json()
    assert document["steps_ms"][:3] == [49, 50, 59]
    assert document["measured_ms"] == 100
    assert document["ratio_interval"] == pytest.approx([2, 2])
    assert document["tokens_per_second_per_gpu"] == pytest.approx(4 * 16 / 2 / 0.1)
    head, first, *_ = train_table(figures).splitlines()
    assert head.split()[:2] == ["schedule", "tokens/s/GPU"]
    assert first.split()[:2] == ["megatron-core", "1F1B"]


def test_megatron_cores_prediction_is_without_the_shards_of_the_run_that_measured(monkeypatch):
    """The output takes as long as six layers: on one rank megatron-core's 1F1B idles for most of the time."""
    model = ModelCosts(UnitCosts(0, 0, 0), (UnitCosts(1, 1, 1),) * 4, UnitCosts(6, 6, 6))
    placement = Placement("linear", 2)

    def turn(command, environment, warmup, timeout):
        if "--zero-bubble-profile-output" in command:
            costs = model.vocabulary_parallel(2).of_stages((2, 2), placement)
            Path(command[-1]).write_text(profile_to_json(Profile(placement, costs, 0.0, {})))
        return Turn((100.0,), (), None, None, 2.0**20)

    monkeypatch.setattr(rounds, "take_turn", turn)
    spread = "zb-h1 --zero-bubble-vocabulary-parallel"
    baseline, ours = rounds.compare_trainings(arguments("--rounds", "1", "--schedule", spread))
    whole = model.of_stages((2, 2), placement)
    assert baseline.predicted_ms == simulate(generate("1f1b", 2, 4, costs=whole), whole).makespan
    assert ours.simulated.schedule.is_vocabulary_parallel
    assert ours.predicted_ms < baseline.predicted_ms


def test_megatron_core_recomputes_in_its_backward(monkeypatch):
    costs = StageCosts.uniform(2, 10, 10, 10, time_r=10, memory_r=0.9)

    def turn(command, environment, warmup, timeout):
        if "--zero-bubble-profile-output" in command:
            Path(command[-1]).write_text(profile_to_json(Profile(Placement("linear", 2), costs, 0.0, {})))
        return Turn((100.0,), (), None, None, 2.0**20)

    monkeypatch.setattr(rounds, "take_turn", turn)
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    baseline, ours = rounds.compare_trainings(arguments("--rounds", "1", "--schedule", "zb-h1", training=full))
    assert (baseline.predicted_ms, max(baseline.simulated.work)) == ((4 + 1) * 40, 4 * 40)
    recomputing = simulate(generate("zb-h1", 2, 4, recompute="full"), costs)
    assert ours.predicted_ms == recomputing.makespan > simulate(generate("zb-h1", 2, 4), costs).makespan


def test_sequences_of_unknown_lengths_have_no_rate_of_tokens(monkeypatch):
    monkeypatch.setattr(rounds, "take_turn", lambda *_: Turn((100.0,), (), None, None, 2.0**20))
    given = arguments("--rounds", "1", "--schedule", "zb-h1", training=["--variable-seq-lengths"])
    for result in rounds.compare_trainings(given):
        assert result.tokens_per_second is None
        assert result.tflops is None


def test_costs_of_stages_in_a_v_do_not_predict_megatron_cores_schedule(monkeypatch):
    linear, in_v = Placement("linear", 2), Placement("v", 2, 2)

    def turn(command, environment, warmup, timeout):
        if "--zero-bubble-profile-output" in command:
            placement = in_v if "v" in command else linear
            costs = StageCosts.uniform(placement.num_stages, *((1,) * 3 if placement == in_v else (4,) * 3))
            Path(command[-1]).write_text(profile_to_json(Profile(placement, costs, 0.0, {})))
        return Turn((100.0,), (), None, None, 2.0**20)

    monkeypatch.setattr(rounds, "take_turn", turn)
    given = ["--rounds", "1", "--schedule", "auto --zero-bubble-placement v", "--schedule", "zb-h1"]
    baseline, *_ = rounds.compare_trainings(arguments(*given))
    assert baseline.predicted_ms == simulate(generate("1f1b", 2, 4), StageCosts.uniform(2, 4, 4, 4)).makespan


def test_losses_are_compared_with_those_of_the_baseline(monkeypatch):
    """Every training draws each layer's weights from its own seed, so that chunks elsewhere have the same."""
    loss = {"zb-2p": 2.000002, "zb-h1": 2.0}

    def turn(command, environment, warmup, timeout):
        assert "--zero-bubble-seed-by-layer" in command
        value = next((loss[word] for word in command if word in loss), 2.0)
        lines = [f"iteration {n}/ 20 | elapsed time per iteration (ms): 1.0 | lm loss: {value:.6E} |" for n in (5, 20)]
        return read_log("\n".join(lines), 10, 1.0)

    monkeypatch.setattr(rounds, "take_turn", turn)
    asked = arguments("--losses", "--rounds", "1", "--schedule", "zb-h1", "--schedule", "zb-2p")
    assert loss_agreement(rounds.compare_trainings(asked)).splitlines() == [
        f"losses of zb-h1 and of {BASELINE}: the same in every digit of all 2 lines, up to iteration 20",
        f"losses of zb-2p and of {BASELINE}: the same up to 1.0e-06 of their value in 2 lines, up to iteration 20",
    ]


def test_one_that_was_asked_for_has_to_run(monkeypatch):
    def fail(*unused):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(rounds, "take_turn", fail)
    with pytest.raises(RuntimeError, match=f"{BASELINE}: no memory left"):
        rounds.compare_trainings(arguments("--schedule", "zb-h1"))


def test_the_interval_narrows_with_agreement_and_needs_three_rounds():
    assert bootstrap_interval([1.1, 1.2]) is None
    assert bootstrap_interval([1.1] * 5) == pytest.approx((1.1, 1.1))
    low, high = bootstrap_interval([1.0, 1.1, 1.2, 1.1, 1.3])
    assert 1.0 <= low < 1.1 < high <= 1.3
    # A round in which the machine was busy with something else does not move it far.
    assert bootstrap_interval([1.2, 1.2, 0.5, 1.2, 1.2, 1.2, 1.2]) == pytest.approx((1.2, 1.2))
    assert bootstrap_interval([1.0, 1.1, 1.2]) == bootstrap_interval([1.0, 1.1, 1.2])


@pytest.mark.exhaustive  # make docs-check runs make compare, which is this command
def test_real_trainings_as_json(tmp_path):
    output = tmp_path / "figures.json"
    counts = ["--rounds", "1", "--warmup", "7", "--iterations", "7", "--interval", "7", "--schedule", "zb-h1"]
    status = main([*SIZE, *counts, "--json", "--output", str(output), "--", *TINY])
    assert status == 0
    baseline, ours = json.loads(output.read_text())
    assert (baseline["schedule"], ours["schedule"]) == (BASELINE, "zb-h1")
    assert baseline["bubble_rate"] is None
    assert 0 < ours["bubble_rate"] < ours["bubble_rate"] + ours["imbalance"] == ours["idle"] < 1
    for one in (baseline, ours):
        assert 0 < one["simulated_bubble_rate"] < 1
        assert one["ideal_ms"] < one["simulated_ms"]
        assert one["peak_memory_bytes"] > 2**20
    assert ours["ratio_to_1f1b"] == pytest.approx(baseline["measured_ms"] / ours["measured_ms"])
