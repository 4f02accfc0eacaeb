"""The benchmark of schedules with real trainings: who runs, what is read from the logs, what is made of it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import train
from benchmarks.train import peers
from megatron.zero_bubble.cli.benchmark import rounds
from megatron.zero_bubble.cli.benchmark.advice import advice
from megatron.zero_bubble.cli.benchmark.arguments import BenchmarkFlags
from megatron.zero_bubble.cli.benchmark.contestants import BASELINE, CHUNKS_FLAG, gather
from megatron.zero_bubble.cli.benchmark.own_training import of_own_training
from megatron.zero_bubble.cli.benchmark.training_results import bootstrap_interval, loss_agreement, train_table
from megatron.zero_bubble.cli.benchmark.training_turn import Turn, read_log, take_turn
from megatron.zero_bubble.cli.benchmark_command import main
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.cli.trainings import complete_arguments
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import Idle, Placement, simulate
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from tests.mistakes import one_line_mistake

ROOT = Path(__file__).parents[2]

TINY = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"]
TINY += ["--micro-batch-size", "1", "--mock-data", "--vocab-size", "120"]
SIZE = ["--pipeline-size", "2", "--num-microbatches", "4"]

LOG = """ > zero-bubble plan; times measured up to step 6, spread 1.0%
     predicted: idle 14.00% (imbalance 4.00%, bubble rate 10.00%), 88.5 ms, 1.060 times as fast as 1F1B
 [2026-11-20 20:01:12.2] iteration        5/     20 | consumed samples:          160 | elapsed time per iteration (ms): 900.0 | learning rate: 1.0E-03 | idle: 53.00% | imbalance: 3.00% | bubble rate: 50.00% |
 [2026-11-20 20:01:12.3] iteration       10/     20 | consumed samples:          320 | elapsed time per iteration (ms): 500.0 | learning rate: 1.0E-03 | idle: 44.00% | imbalance: 4.00% | bubble rate: 40.00% | predicted: 10.00% |
[Rank 1] (after 20 iterations) memory (MB) | allocated: 1.00 | max allocated: 30.00 | reserved: 64.00 | max reserved: 64.00
[Rank 0] (after 20 iterations) memory (MB) | allocated: 1.00 | max allocated: 20.00 | reserved: 64.00 | max reserved: 64.00
 [2026-11-20 20:01:12.4] iteration       15/     20 | consumed samples:          480 | elapsed time per iteration (ms): 100.0 | learning rate: 1.0E-03 | idle: 17.50% | imbalance: 5.00% | bubble rate: 12.50% | predicted: 11.00% |
 [2026-11-20 20:01:12.5] iteration       20/     20 | consumed samples:          640 | elapsed time per iteration (ms): 110.5 | learning rate: 1.0E-03 | idle: 19.50% | imbalance: 6.00% | bubble rate: 13.50% | predicted: 11.00% |
"""  # noqa: E501


def arguments(*flags: str):
    return read_flags(BenchmarkFlags, [*SIZE, *flags, "--", *TINY], "benchmark", "")


def test_a_log_is_read_after_its_warmup():
    turn = read_log(LOG, warmup=10, resident_bytes=1.0)
    idle = (Idle(0.05, 0.125), Idle(0.06, 0.135))
    assert turn == Turn((100.0, 110.5), idle, 0.11, 88.5, 30 * 2**20, is_device_memory=True)


def test_a_logs_summary_has_the_time_in_the_pipeline():
    summary = " > iterations 16 to 20: 105.2 ms each, 92.5 ms of it in the pipeline, 90.1 predicted; bubble rate ...\n"
    turn = read_log(LOG + summary, 10, 1.0)
    assert (turn.pipeline_ms, turn.predicted_ms) == (92.5, 90.1)


@pytest.mark.parametrize(
    ("cells", "layout"),
    [
        ("V                      2 1x6 0", "V 2 1x6 0"),
        ("interleaved, 2 chunks  4x2", "interleaved, 2 chunks 4x2"),
    ],
)
def test_a_log_says_which_layout_was_chosen(cells, layout):
    row = f"     chosen: {cells}        431.7   5.93%  22.83%                71.4\n"
    assert read_log(row + LOG, 10, 1.0).layout == layout


def test_megatron_cores_log_says_nothing_of_bubbles_and_a_cpus_nothing_of_memory():
    text = "\n".join(line.split(" | idle")[0] for line in LOG.splitlines() if "iteration  " in line)
    assert read_log(text, 10, 7.0) == Turn((100.0, 110.5), (), None, None, 7.0)


def test_a_log_without_measured_iterations_is_an_error():
    with pytest.raises(RuntimeError, match="no iteration after its warmup"):
        read_log(LOG, warmup=20, resident_bytes=1.0)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('pretrain_gpt.py: error: --lr is wrong'); raise SystemExit(2)", "^--lr is wrong$"),
        ("raise KeyError('lost')", "KeyError: 'lost'"),
        ("raise SystemExit(5)", "status 5"),
        ("import time; time.sleep(60)", "ended because it was not done within --timeout 1 s"),
    ],
)
def test_a_training_that_fails_says_why_in_one_line(program, reason):
    with pytest.raises(RuntimeError, match=reason) as caught:
        take_turn([sys.executable, "-c", program], {}, 0, timeout=1 if "sleep" in program else 60)
    assert "\n" not in str(caught.value)


def test_the_field_has_the_baseline_first_and_every_peer():
    given = arguments("--schedule", "zb-h1", "--schedule", "auto --zero-bubble-memory-limit 2")
    field = gather(given, False, tuple(peers(given)))
    assert [one.name for one in field.contestants] == [
        *(BASELINE, "zb-h1", "auto --zero-bubble-memory-limit 2", "megatron-core interleaved"),
        *("torch GPipe", "torch 1F1B", "torch Interleaved1F1B", "torch InterleavedZeroBubble"),
        *("torch ZBVZeroBubble", "torch DualPipeV"),
    ]
    flags = " ".join(field.flags)
    assert "--pipeline-model-parallel-size 2" in flags
    assert "--global-batch-size 4" in flags
    assert field.args.global_batch_size == 4
    assert field.contestants[2].words == ("--zero-bubble-schedule", "auto", "--zero-bubble-memory-limit", "2")


def test_the_field_of_what_zero_bubble_alone_chooses():
    given = arguments("--schedule", "chosen", "--schedule", "chosen --zero-bubble-placement v", "--num-chunks", "2")
    _, alone, v = gather(given, False).contestants
    assert (alone.name, alone.words) == ("chosen", ("--zero-bubble",))
    assert (v.name, v.words) == ("chosen --zero-bubble-placement v", ("--zero-bubble", "--zero-bubble-placement", "v"))


def test_the_baseline_alone_gets_its_flags():
    given = arguments("--schedule", "zb-h1", "--baseline-flags", "--recompute-activations --init-method-std 0.01")
    baseline, ours = gather(given, False).contestants
    assert baseline.words == ("--recompute-activations", "--init-method-std", "0.01")
    assert "--recompute-activations" not in ours.words


def test_zero_bubble_flags_after_the_dashes_reach_no_baseline_and_a_quote_replaces_them():
    words = ["--zero-bubble-memory-limit=2", "--enable-optimizer-post-validation", "--lr", "1e-3"]
    quotes = ["--schedule", "auto --zero-bubble-memory-limit 1.5 --lr 1e-2", "--schedule", "chosen"]
    given = read_flags(BenchmarkFlags, [*SIZE, *quotes, "--", *TINY, *words], "", "").of_named_schedules()
    field = gather(given, False, (*peers(given, with_torch=False),))
    baseline, auto, chosen, interleaved = field.contestants
    assert (baseline.words, interleaved.words) == ((), (CHUNKS_FLAG, "2"))
    assert {"--zero-bubble-memory-limit=2", "--enable-optimizer-post-validation"}.isdisjoint(field.flags)
    assert chosen.words == ("--zero-bubble", *words[:2])
    trained = complete_arguments([*field.flags, *auto.words], 2, "", has_cuda=False)
    assert (trained.zero_bubble_memory_limit, trained.lr) == ("1.5", 1e-2)
    assert trained.zero_bubble_post_validation


@pytest.mark.parametrize("chunks", [f"{CHUNKS_FLAG} 3", f"{CHUNKS_FLAG}=3"])
def test_a_schedules_own_number_of_chunks_is_kept(chunks):
    model = ["--num-layers", "6", *TINY[2:]]
    given = read_flags(BenchmarkFlags, [*SIZE, "--schedule", f"interleaved-zb {chunks}", "--", *model], "", "")
    _, ours = gather(given, False, ()).contestants
    assert ours.words == ("--zero-bubble-schedule", "interleaved-zb", *chunks.split())
    assert ours.placement == Placement("interleaved", 2, 3)


@pytest.mark.parametrize(
    ("flags", "has_megatrons", "has_torchs"),
    [((), False, False), (("--peers",), True, True), (("--peers", "megatron-core"), True, False)],
)
def test_peers_of_torch_can_be_left_out(monkeypatch, flags, has_megatrons, has_torchs):
    names = []
    monkeypatch.setattr(train, "benchmark", lambda _, peers: names.extend(one.name for one in peers))
    assert train.main([*SIZE, *flags, "--", *TINY]) == 0
    assert ("megatron-core interleaved" in names) == has_megatrons
    assert ("torch GPipe" in names) == has_torchs


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
        ([*SIZE, "--schedule", "zb-h1 --train-iters 5", "--", *TINY], "--schedule: --train-iters not allowed in"),
        ([*SIZE, "--schedule", 'zb-h1 "x', "--", *TINY], "--schedule: expected words as in a shell, got 'zb-h1 \"x'"),
        ([*SIZE, "--baseline-flags", '"', "--", *TINY], "--baseline-flags: expected words as in a shell"),
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


OWN = [*TINY, "--pipeline-model-parallel-size=2", "--global-batch-size", "8", "--train-iters", "80000"]
OWN += ["--lr", "1e-3", "--lr-warmup-iters", "400", "--save", "somewhere", "--load", "elsewhere", "--eval-iters", "9"]
OWN += ["--num-layers-per-virtual-pipeline-stage", "1", "--zero-bubble-memory-limit", "1.5", "--log-interval", "100"]


def own_field(*more: str):
    given = read_flags(BenchmarkFlags, ["--warmup", "10", "--", *OWN, *more], "benchmark", "")
    flags, others = of_own_training(given, 0)
    return flags, gather(flags, False, others)


def test_a_training_of_ones_own_runs_under_megatron_cores_schedules_and_the_plan(capsys):
    flags, field = own_field()
    assert (flags.pipeline_size, flags.num_microbatches, flags.num_ranks) == (2, 8, 2)
    assert [(one.name, one.words) for one in field.contestants] == [
        (BASELINE, ()),
        (name := "--zero-bubble --zero-bubble-memory-limit 1.5", tuple(name.split())),
        ("megatron-core interleaved, 2 chunks", ("--num-virtual-stages-per-pipeline-rank", "2")),
    ]
    assert (
        "megatron-core interleaved, 4 chunks left out: --num-virtual-stages-per-pipeline-rank 4 x"
        in capsys.readouterr().err
    )
    words = " ".join(field.flags)
    assert "--train-iters 80000 --lr 1e-3 --lr-warmup-iters 400 --exit-interval 30" in words
    assert "--log-interval 5" in words
    assert not {"--save", "--load", "--num-layers-per-virtual-pipeline-stage"} & {*field.flags}
    assert (field.args.save, field.args.eval_iters, field.args.global_batch_size) == (None, 0, 8)


def test_gpus_hold_as_many_replicas_of_a_training_as_fit():
    given = read_flags(BenchmarkFlags, ["--", *OWN], "benchmark", "")
    flags, _ = of_own_training(given, num_devices=5)
    assert (flags.num_ranks, flags.num_microbatches) == (4, 4)


def test_a_named_schedule_after_the_dashes_is_the_plan():
    _, field = own_field("--zero-bubble-schedule", "zb-v")
    assert field.contestants[1].words == ("--zero-bubble-memory-limit", "1.5", "--zero-bubble-schedule", "zb-v")


def own_results(monkeypatch, **milliseconds: list[float]):
    """The results of rounds that took these times, by a word of the command."""
    calls = Counter()

    def turn(command, environment, warmup, timeout):
        name = (
            "plan"
            if "--zero-bubble" in command
            else "chunks"
            if "2" in command[-30:] and CHUNKS_FLAG in command
            else "core"
        )
        calls[name] += 1
        return Turn((milliseconds[name][calls[name] - 1],), (), None, None, 2.0**30)

    monkeypatch.setattr(rounds, "take_turn", turn)
    given = read_flags(BenchmarkFlags, ["--rounds", str(len(milliseconds["core"])), "--", *OWN], "benchmark", "")
    flags, others = of_own_training(given, 0)
    return rounds.compare_trainings(flags, others)


def test_the_advice_names_the_fastest_and_by_how_much(monkeypatch):
    results = own_results(monkeypatch, core=[120.0, 242, 118], plan=[100.0, 200, 100], chunks=[110.0, 230, 115])
    assert advice(results, iterations=20).splitlines() == [
        "Use --zero-bubble --zero-bubble-memory-limit 1.5: 1.15 (1.10 to 1.15) times as fast as megatron-core "
        "interleaved, 2 chunks, 1.20 (1.18 to 1.21) times as fast as megatron-core 1F1B.",
        "Its largest process, its libraries included, takes 1024 MiB, megatron-core 1F1B's 1024.",
    ]


def test_the_advice_names_the_allocators_memory_on_gpus(monkeypatch):
    results = own_results(monkeypatch, core=[120.0], plan=[100.0], chunks=[110.0])
    on_gpus = [replace(one, turns=tuple(replace(turn, is_device_memory=True) for turn in one.turns)) for one in results]
    assert (
        advice(on_gpus, iterations=20).splitlines()[-1] == "Its fullest GPU takes 1024 MiB, megatron-core 1F1B's 1024."
    )


def test_the_advice_admits_what_the_rounds_do_not_tell_apart(monkeypatch):
    results = own_results(monkeypatch, core=[120.0] * 3, plan=[100.0, 111, 99], chunks=[90.0, 112, 89])
    text = advice(results, iterations=20)
    assert text.startswith("Use megatron-core interleaved, 2 chunks (--num-virtual-stages-per-pipeline-rank 2): ")
    assert "show no clear difference from --zero-bubble --zero-bubble-memory-limit 1.5: more --rounds may." in text


def test_nothing_is_recommended_that_may_be_slower_than_1f1b(monkeypatch):
    results = own_results(monkeypatch, core=[120.0] * 3, plan=[100.0, 130, 99], chunks=[121.0] * 3)
    first, second, _ = advice(results, iterations=20).splitlines()
    assert first.startswith(
        "No schedule is faster than megatron-core 1F1B beyond doubt. The fastest was --zero-bubble "
        "--zero-bubble-memory-limit 1.5: 1.20 (0.92 to 1.21) times as fast as megatron-core 1F1B"
    )
    assert second.startswith(
        "These rounds show no clear difference from megatron-core 1F1B and megatron-core interleaved, 2"
    )


@pytest.mark.parametrize(
    ("rounds", "iterations", "words"), [(1, 20, "1 round of 20 iterations"), (3, 1, "3 rounds of 1 iteration")]
)
def test_nothing_is_recommended_after_a_trial(monkeypatch, rounds, iterations, words):
    results = own_results(monkeypatch, core=[120.0] * rounds, plan=[100.0] * rounds, chunks=[110.0] * rounds)
    text = advice(results, iterations)
    assert f"A trial, after which no schedule is recommended: {words}. At least --rounds 3 and" in text
    assert "The fastest schedule was --zero-bubble" in text
    assert "Use" not in text


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
