"""A training of one's own runs under megatron-core's schedules and the plan, and the advice names the fastest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tiny_benchmark import TINY

from megatron.zero_bubble.cli.benchmark import rounds
from megatron.zero_bubble.cli.benchmark.advice import advice
from megatron.zero_bubble.cli.benchmark.arguments import BenchmarkFlags
from megatron.zero_bubble.cli.benchmark.contestants import BASELINE, CHUNKS_FLAG, gather
from megatron.zero_bubble.cli.benchmark.own_training import of_own_training
from megatron.zero_bubble.cli.benchmark.training_turn import Turn
from megatron.zero_bubble.cli.invocation import read_flags

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


def test_a_training_writes_no_file_of_its_user():
    outputs = {"--log-numerics": "n", "--persistent-save-interval": "9", "--zero-bubble-timeline": "t"}
    outputs |= {"--zero-bubble-timeline-iters": "8 9", "--zero-bubble-unit-costs-output": "u"}
    given = [word for name, value in outputs.items() for word in (name, *value.split())]
    _, field = own_field(*given, "--zero-bubble-profile-output=p")
    words = {word.split("=")[0] for one in field.contestants for word in (*field.flags, *one.words)}
    assert not {*outputs, "--zero-bubble-profile-output"} & words


def test_a_value_that_begins_with_a_dash_stays_beside_its_flag():
    flags, _ = of_own_training(read_flags(BenchmarkFlags, ["--", *OWN, "--hybrid-layer-pattern=-*-*"], "", ""), 0)
    assert "--hybrid-layer-pattern=-*-*" in flags.training_flags


@pytest.mark.parametrize("name", ["tensor-model-parallel-size", "micro-batch-size", "global-batch-size"])
def test_a_size_of_zero_is_one_line(name: str):
    with pytest.raises(ValueError, match=f"^--{name} must be at least 1, got 0$"):
        own_field(f"--{name}", "0")


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
    assert (
        "The difference from --zero-bubble --zero-bubble-memory-limit 1.5 is not significant: give more --rounds."
        in text
    )


def test_nothing_is_recommended_that_may_be_slower_than_1f1b(monkeypatch):
    results = own_results(monkeypatch, core=[120.0] * 3, plan=[100.0, 130, 99], chunks=[121.0] * 3)
    first, second, _ = advice(results, iterations=20).splitlines()
    assert first.startswith(
        "No schedule is significantly faster than megatron-core 1F1B. The fastest was --zero-bubble "
        "--zero-bubble-memory-limit 1.5: 1.20 (0.92 to 1.21) times as fast as megatron-core 1F1B"
    )
    assert second.startswith("The difference from megatron-core 1F1B and megatron-core interleaved, 2")


@pytest.mark.parametrize(
    ("rounds", "iterations", "words"), [(1, 20, "1 round of 20 iterations"), (3, 1, "3 rounds of 1 iteration")]
)
def test_nothing_is_recommended_after_a_trial(monkeypatch, rounds, iterations, words):
    results = own_results(monkeypatch, core=[120.0] * rounds, plan=[100.0] * rounds, chunks=[110.0] * rounds)
    text = advice(results, iterations)
    assert f"A trial, after which no schedule is recommended: {words}. At least --rounds 3 and" in text
    assert "The fastest schedule was --zero-bubble" in text
    assert "Use" not in text
