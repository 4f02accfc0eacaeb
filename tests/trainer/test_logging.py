"""The log is an interface: people's scripts parse its lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core.timers import Timers

from megatron.zero_bubble.mcore.post_validation import StepOutcome
from megatron.zero_bubble.trainer import logging
from megatron.zero_bubble.trainer.arguments import Arguments, parse_arguments
from megatron.zero_bubble.trainer.checkpoint import Progress
from megatron.zero_bubble.trainer.logging import StepResult, TrainingLog

TRAINING_LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +(?P<iteration>\d+)/ *(?P<last>\d+) \|"
    r" consumed samples: +(?P<samples>\d+) \|"
    r" elapsed time per iteration \(ms\): (?P<milliseconds>\d+\.\d) \|"
    r" learning rate: (?P<rate>\d\.\d{6}E[+-]\d\d) \|"
    r" global batch size: +(?P<batch>\d+) \|"
    r"(?: lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d) \|)?"
    r" loss scale: (?P<scale>\d+\.\d) \|"
    r"(?: grad norm: (?P<norm>\d+\.\d{3}) \|)?"
    r"(?: num zeros: (?P<zeros>\d+\.\d) \|)?"
    r" number of skipped iterations: +(?P<skipped>\d+) \|"
    r" number of nan iterations: +(?P<nan>\d+) \|"
)
"""Megatron-LM's line, as scripts take it apart."""

UPDATED = StepOutcome(was_updated=True, grad_norm=1.5, num_zeros=12.0)
SKIPPED = StepOutcome(was_updated=False, grad_norm=None)
STEP = StepResult(lm_loss=4.25, outcome=UPDATED, learning_rate=1.5e-4, loss_scale=1.0, batch_size=8)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(logging, "_now", clock)
    return clock


def make_args(*flags: str) -> Arguments:
    args = parse_arguments(
        [
            *("--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2", "--seq-length", "16"),
            *("--micro-batch-size", "2", "--train-iters", "1000", "--lr", "1e-3", "--log-interval", "2", *flags),
        ]
    )
    return replace(args, kv_channels=4, ffn_hidden_size=32, padded_vocab_size=128)


def run(log: TrainingLog, clock: Clock, *results: StepResult, seconds: float = 0.25) -> None:
    for result in results:
        clock.now += seconds
        log.progress.iteration += 1
        log.progress.consumed_train_samples += result.batch_size
        log.record(result)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_line_is_megatrons_to_the_letter(clock, capsys):
    args = make_args()
    run(TrainingLog(args, Progress(), log_rank=0), clock, STEP, STEP)
    (line,) = lines_of(capsys)
    assert re.sub(r"\[.*?\]", "[time]", line) == (
        " [time] iteration        2/    1000 | consumed samples:           16 |"
        " elapsed time per iteration (ms): 250.0 | learning rate: 1.500000E-04 | global batch size:     8 |"
        " lm loss: 4.250000E+00 | loss scale: 1.0 | grad norm: 1.500 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_scripts_can_take_it_apart(clock, capsys):
    args = make_args("--log-num-zeros-in-grad")
    run(TrainingLog(args, Progress(), log_rank=0), clock, STEP, STEP, STEP, STEP)
    matches = [TRAINING_LINE.fullmatch(line) for line in lines_of(capsys)]
    assert [match["iteration"] for match in matches] == ["2", "4"]
    assert matches[1].groupdict() == {
        "iteration": "4", "last": "1000", "samples": "32", "milliseconds": "250.0",
        "rate": "1.500000E-04", "batch": "8", "loss": "4.250000E+00", "scale": "1.0", "norm": "1.500", "zeros": "12.0",
        "skipped": "0", "nan": "0",
    }  # fmt: skip


def test_the_loss_is_the_mean_since_the_last_line(clock, capsys):
    args = make_args()
    losses = [2.0, 4.0, 10.0, 20.0]
    run(TrainingLog(args, Progress(), log_rank=0), clock, *[step(lm_loss=loss) for loss in losses])
    assert [TRAINING_LINE.fullmatch(line)["loss"] for line in lines_of(capsys)] == ["3.000000E+00", "1.500000E+01"]


def step(**changes: float | StepOutcome | None) -> StepResult:
    return StepResult(**{**vars(STEP), **changes})


def test_skipped_and_nan_iterations_are_counted_and_left_out_of_the_loss(clock, capsys):
    args = make_args("--log-interval", "5")
    skipped_too = step(lm_loss=100.0, outcome=SKIPPED)
    skipped = step(lm_loss=math.inf, outcome=SKIPPED)
    run(
        TrainingLog(args, Progress(), log_rank=0),
        clock,
        step(lm_loss=2.0),
        skipped,
        step(lm_loss=math.nan),
        skipped_too,
        step(lm_loss=4.0),
    )
    run(TrainingLog(args, Progress(), log_rank=0), clock, *[skipped] * 5)
    first, second = (TRAINING_LINE.fullmatch(line).groupdict() for line in lines_of(capsys))
    assert (first["loss"], first["norm"], first["skipped"], first["nan"]) == ("3.000000E+00", "1.500", "2", "2")
    assert (second["loss"], second["norm"], second["skipped"], second["nan"]) == (None, None, "5", "5")


def test_an_optimizer_that_computes_no_norm_skips_nothing(clock, capsys):
    """megatron-core's FP32Optimizer with --clip-grad 0."""
    args = make_args()
    run(
        TrainingLog(args, Progress(), log_rank=0),
        clock,
        *[step(outcome=StepOutcome(was_updated=True, grad_norm=None))] * 2,
    )
    match = TRAINING_LINE.fullmatch(lines_of(capsys)[0])
    assert (match["loss"], match["norm"], match["skipped"]) == ("4.250000E+00", None, "0")


def test_what_is_not_training_takes_no_time(clock, capsys):
    args = make_args()
    log = TrainingLog(args, Progress(), log_rank=0)
    run(log, clock, STEP)
    with log.untimed():
        clock.now += 1000.0
    run(log, clock, STEP)
    assert TRAINING_LINE.fullmatch(lines_of(capsys)[0])["milliseconds"] == "250.0"


def test_only_the_rank_that_holds_the_loss_prints(clock, capsys):
    args = make_args()
    log = TrainingLog(args, Progress(), log_rank=1)
    run(log, clock, step(lm_loss=None), step(lm_loss=None))
    log.record_validation(2.0)
    assert lines_of(capsys) == []


def test_the_line_of_an_evaluation(clock, capsys):
    args = make_args()
    TrainingLog(args, Progress(iteration=30), log_rank=0).record_validation(2.0)
    rule, line, same_rule = lines_of(capsys)
    assert line == " validation loss at iteration 30 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert rule == same_rule == "-" * (len(line) + 1)


def test_a_perplexity_beyond_all_bounds_is_cut_as_megatron_cuts_it(clock, capsys):
    TrainingLog(make_args(), Progress(), log_rank=0).record_validation(800.0)
    assert "lm loss PPL: 4.851652E+08 |" in lines_of(capsys)[1]  # exp(20)


def test_a_rank_without_the_loss_says_nothing_of_an_evaluation(clock, capsys):
    TrainingLog(make_args(), Progress(), log_rank=0).record_validation(None)
    assert lines_of(capsys) == []


def test_megatron_cores_timers_follow_each_line(clock, capsys, monkeypatch):
    timers = Timers(1, "minmax")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for _ in range(2):
        timers("forward-backward", log_level=1).start()
        timers("forward-backward").stop()
        timers("forward-compute", log_level=2).start()
    run(TrainingLog(make_args(), Progress(), 0, timers), clock, STEP, STEP)
    line, title, time = lines_of(capsys)
    assert TRAINING_LINE.match(line)
    assert title == "(min, max) time across ranks (ms):"
    assert re.fullmatch(r"    forward-backward \.+: \(\d+\.\d\d, \d+\.\d\d\)", time)
