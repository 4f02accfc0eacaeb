"""The benchmark of a Megatron-LM script of the user's own, which runs under the launcher."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from megatron.zero_bubble.cli.benchmark import rounds
from megatron.zero_bubble.cli.benchmark.arguments import BenchmarkFlags
from megatron.zero_bubble.cli.benchmark.contestants import BASELINE, CHUNKS_FLAG, gather
from megatron.zero_bubble.cli.benchmark.own_training import of_own_training
from megatron.zero_bubble.cli.benchmark.training_turn import Turn, read_log
from megatron.zero_bubble.cli.benchmark_command import main
from megatron.zero_bubble.cli.invocation import read_flags
from tests.launch import ROOT
from tests.mistakes import one_line_mistake

SCRIPT = str(ROOT / "tests" / "launcher" / "checkout" / "pretrain_small.py")
FLAGS = ["--pipeline-model-parallel-size=2", "--num-layers", "4", "--micro-batch-size", "1", "--global-batch-size", "4"]
FLAGS += [
    "--seq-length",
    "16",
    "--train-iters",
    "50",
    "--log-interval",
    "3",
    "--save",
    "somewhere",
    "--eval-iters",
    "3",
]
ON_CPU = [*FLAGS, "--zero-bubble-cpu"]

# Printed by the pretrain_gpt.py of core_v0.16.1 and of core_v0.19.0, which also shows the first iteration. The
# figures of throughput and memory are not those of the CPU on which it ran.
CORE_0_16 = """ [2026-11-21 22:07:38.308877] iteration       10/     100 | consumed samples:           40 | elapsed time per iteration (ms): 114.2 | throughput per GPU (TFLOP/s/GPU): 11.5 | learning rate: 9.000000E-03 | global batch size:     4 | lm loss: 4.853444E+00 | loss scale: 1.0 | grad norm: 1.902 | number of skipped iterations:   0 | number of nan iterations:   0 |
 [2026-11-21 22:07:38.408877] iteration       15/     100 | consumed samples:           60 | elapsed time per iteration (ms): 32.2 | throughput per GPU (TFLOP/s/GPU): 40.5 | learning rate: 4.000000E-03 | global batch size:     4 | lm loss: 4.711456E+00 | loss scale: 1.0 | grad norm: 0.989 | number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 1] (after 15 iterations) memory (MB) | allocated: 1.00 | max allocated: 30.00 | reserved: 64.00 | max reserved: 64.00
[Rank 0] (after 15 iterations) memory (MB) | allocated: 1.00 | max allocated: 20.00 | reserved: 64.00 | max reserved: 64.00
"""  # noqa: E501
CORE_0_19 = """ [2026-11-21 22:08:24.356602] iteration        1/     100 | consumed samples:            4 | elapsed time per iteration (ms): 357.3 | throughput per GPU (TFLOP/s/GPU): 0.0 | learning rate: 9.000000E-03 | global batch size:     4 | lm loss: 4.838604E+00 | loss scale: 1.0 | grad norm: 1.857 | number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 0.00 | max allocated: 0.00 | reserved: 0.00 | max reserved: 0.00
 [2026-11-21 22:08:30.099865] iteration       15/     100 | consumed samples:           60 | elapsed time per iteration (ms): 661.9 | throughput per GPU (TFLOP/s/GPU): 0.0 | learning rate: 4.000000E-03 | global batch size:     4 | lm loss: 4.730245E+00 | loss scale: 1.0 | grad norm: 1.031 | number of skipped iterations:   0 | number of nan iterations:   0 | idle: 17.50% | imbalance: 5.00% | bubble rate: 12.50% | predicted: 11.00% |
"""  # noqa: E501


def test_what_megatron_lm_prints_is_read():
    turn = read_log(CORE_0_16, warmup=10, resident_bytes=7.0)
    assert (turn.iteration_ms, turn.tflops, turn.losses) == ((32.2,), (40.5,), ((10, 4.853444), (15, 4.711456)))
    assert (turn.peak_bytes, turn.is_device_memory) == (30 * 2**20, True)


def test_zeros_that_megatron_lm_prints_on_a_cpu_are_unknown():
    turn = read_log(CORE_0_19, warmup=10, resident_bytes=7.0)
    assert (turn.iteration_ms, turn.tflops) == ((661.9,), ())
    assert (turn.peak_bytes, turn.is_device_memory) == (7.0, False)
    assert turn.predicted_bubble_rate == 0.11


def test_a_training_whose_numbers_are_broken_has_no_time():
    with pytest.raises(RuntimeError, match="grad norm of iteration 10 is NaN"):
        read_log(CORE_0_16.replace("grad norm: 1.902", "grad norm: nan"), 10, 7.0)


def field(*flags: str, benchmark: tuple[str, ...] = (), num_devices: int = 0):
    given = read_flags(BenchmarkFlags, [*benchmark, "--", SCRIPT, *flags], "benchmark", "")
    resolved, others = of_own_training(given, num_devices)
    return gather(resolved, num_devices > 0, others)


def test_a_script_runs_under_the_launcher_without_and_with_the_plan():
    limited = ("--zero-bubble-memory-limit", "1.5", "--hierarchical-sgd", "2:1")
    field_on_cpu = field(*ON_CPU, *limited)
    assert {one.program for one in field_on_cpu.contestants} == {("-m", "megatron.zero_bubble", SCRIPT)}
    assert [(one.name, one.words) for one in field_on_cpu.contestants] == [
        (BASELINE, ()),
        (" ".join(("--zero-bubble", *limited)), ("--zero-bubble", *limited)),
        ("megatron-core interleaved, 2 chunks", (CHUNKS_FLAG, "2")),
    ]
    words = " ".join(field_on_cpu.flags)
    assert "--seq-length 16 --train-iters 50 --zero-bubble-cpu --exit-interval 50 --log-throughput" in words
    assert "--eval-iters 0" in words
    assert "--log-interval 5" in words
    assert "--save" not in words


def test_gpus_hold_as_many_replicas_of_a_script_as_fit():
    on_gpus = field(*FLAGS, num_devices=5)
    assert on_gpus.args.data_parallel_size == 2
    assert on_gpus.flags[on_gpus.flags.index("--global-batch-size") + 1] == "4"
    assert "--log-memory-interval" in on_gpus.flags


def test_our_own_pretrain_gpt_may_be_named_like_a_script():
    given = read_flags(BenchmarkFlags, ["--", str(ROOT / "pretrain_gpt.py"), "--num-layers"], "benchmark", "")
    with pytest.raises(ValueError, match="--num-layers: expected one argument"):
        of_own_training(given, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "torchrun", SCRIPT, *ON_CPU], "torchrun is not a file: give flags after --, or a script"),
        (["--", SCRIPT, *FLAGS], "--zero-bubble-cpu: required after --"),
        (["--losses", "--", SCRIPT, *ON_CPU], "--losses: not allowed with a script"),
        (["--pipeline-size", "2", "--num-microbatches", "4", "--", SCRIPT, *ON_CPU], "--pipeline-size: not allowed"),
        (["--", SCRIPT, *ON_CPU, "--yaml-cfg=x"], "--yaml-cfg: not allowed after --"),
        (["--", SCRIPT, "--zero-bubble-cpu"], "required: --micro-batch-size"),
        (["--", SCRIPT, *ON_CPU, "--zero-bubble-no-such-flag"], "--zero-bubble-no-such-flag is not a flag"),
        (["--", SCRIPT, *ON_CPU, "--pipeline-model-parallel-size", "3"], "--num-layers 4"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(words, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert message in one_line_mistake(main, words, capsys)


def test_a_script_that_is_not_megatron_lms_is_named_in_one_line(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    assert main(["--launch", sys.executable, "--world-size", "2", "--", str(script), *FLAGS]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(
        f"zero-bubble benchmark: error: {BASELINE}: the training printed no line with 'elapsed time per iter"
    )


def test_json_has_the_advice_and_null_for_what_is_unknown(monkeypatch, capsys):
    def turn(command, environment, warmup, timeout):
        milliseconds = 50.0 if "--zero-bubble" in command else 100.0
        return Turn((milliseconds,), (), None, None, 2.0**30, tflops=() if CHUNKS_FLAG in command else (3.5,))

    monkeypatch.setattr(rounds, "take_turn", turn)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    unsized = [word for word in ON_CPU if word not in ("--seq-length", "16")]
    assert main(["--rounds", "3", "--json", "--", SCRIPT, *unsized]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["advice"].startswith("Use --zero-bubble: 2.00 (2.00 to 2.00) times as fast as megatron-core 1F1B")
    assert [one["tokens_per_second_per_gpu"] for one in document["results"]] == [None] * 3
    assert [one["tflops_per_gpu"] for one in document["results"]] == [3.5, 3.5, None]
    assert main(["--rounds", "1", "--", SCRIPT, *unsized]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["megatron-core", "1F1B", "-", "3.5"]


@pytest.mark.exhaustive  # three jobs; what they run and print is tested apart above
def test_a_script_trains_under_all_schedules(monkeypatch, capsys):
    counts = ["--rounds", "1", "--warmup", "7", "--iterations", "7", "--interval", "7", "--json"]
    assert main([*counts, "--", SCRIPT, *ON_CPU]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [one["schedule"] for one in results] == [BASELINE, "--zero-bubble", "megatron-core interleaved, 2 chunks"]
    assert [one["bubble_rate"] is None for one in results] == [True, False, True]
    for one in results:
        assert one["tokens_per_second_per_gpu"] == pytest.approx(4 * 16 / 2 / one["measured_ms"] * 1e3)
        assert one["tflops_per_gpu"] is None
        assert one["peak_memory_bytes"] > 2**20
