"""The schedule `auto` is estimated under the memory limit of the job, and where nothing fits, a line says what does."""

from __future__ import annotations

import json

import pytest
from estimated_jobs import FOUR
from flagged_job import GIB, JOB, LIMIT, job, lines_of, room_for

from megatron.zero_bubble.cli.estimate.schedule_estimate import Estimate, estimate
from megatron.zero_bubble.cli.estimate_command import main


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[Estimate, str]:
    """The schedule `auto`, and the line about it."""
    assert main([*FOUR, "--json", "--schedule", "auto", "--", *JOB, *flags]) == 0
    [note] = json.loads(capsys.readouterr().out)["notes"]
    return estimate(job(*flags), "auto"), note


def test_auto_is_planned_under_the_limit_of_the_job(capsys):
    peak = max(estimate(job(), "1f1b").activation_bytes)
    by_default, note = planned(capsys, "--zero-bubble")
    assert by_default.limit == pytest.approx(peak)
    assert max(by_default.activation_bytes) <= by_default.limit * (1 + 1e-9)
    assert "1F1B's peak, by --zero-bubble-memory-limit 1 (the default); the limit auto would be" in note
    half_more, note = planned(capsys, "--zero-bubble", LIMIT, "1.5")
    assert half_more.limit == pytest.approx(1.5 * peak)
    assert max(half_more.activation_bytes) > peak
    assert note == (f"auto: planned for {1.5 * peak / GIB:.2f} GiB of activations, by --zero-bubble-memory-limit 1.5")
    in_bytes, note = planned(capsys, "--zero-bubble", LIMIT, "3GiB")
    assert in_bytes.limit == 3 * GIB
    assert note.endswith("planned for 3.00 GiB of activations, by --zero-bubble-memory-limit 3GiB")
    forwards, note = planned(capsys, "--zero-bubble", "--zero-bubble-max-pending-backward", "6")
    assert forwards.limit == pytest.approx(1.5 * peak)
    assert note.endswith(", by --zero-bubble-max-pending-backward 6")


def test_auto_takes_what_a_job_would_find_free(capsys):
    """The limit of every rank is nine tenths of the free memory of the fullest rank."""
    said, note = planned(capsys, "--zero-bubble", LIMIT, "auto")
    cluster = said.job.cluster
    assert said.limit == int(0.9 * (cluster.device_memory - cluster.reserved_memory - max(said.state_bytes)))
    assert note.endswith("nine tenths of the free memory of the fullest rank, by --zero-bubble-memory-limit auto")


def test_without_a_limit_auto_has_that_of_a_job(capsys):
    unsaid, note = planned(capsys)
    by_default, _ = planned(capsys, "--zero-bubble")
    assert unsaid.limit == by_default.limit
    assert unsaid.timeline.schedule == by_default.timeline.schedule
    assert note.endswith("the peak of megatron-core's own schedule, as a job with --zero-bubble has by default")


def test_what_does_not_fit_gets_a_row_with_what_it_needs_and_what_there_is(capsys):
    tiny = ["--device-memory", "256MiB", "--reserved-memory", "1B", "--schedule", "auto", "--schedule", "1f1b"]
    output = lines_of(capsys, *tiny, "--", *JOB, "--zero-bubble", LIMIT, "auto")
    for name in ("auto", "1f1b"):
        [row] = [line for line in output if line.startswith(f"{name}  ")]
        needed = row.split()[4]
        assert f"  no: {needed} of 0.25 GiB  " in row
    [note] = [line for line in output if line.startswith("auto: needs at least ")]
    assert " GiB of activations, and gets 0.00, nine tenths of the free memory" in note
    by_default = lines_of(capsys, *tiny, "--", *JOB, "--zero-bubble")
    assert any(line.startswith("auto: planned for ") for line in by_default)


@pytest.mark.exhaustive  # it plans ten schedules
def test_where_nothing_fits_the_way_out_is_recomputation_and_its_price(capsys):
    fully = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    chosen = ["--schedule", "zb-h1", "--schedule", "zb-h2"]
    output = lines_of(capsys, *room_for("zb-h1", *fully), *chosen, "--", *JOB)
    planned, kept = (estimate(job(*flags), "zb-h1").iteration_ms for flags in (fully, ()))
    fastest = min(kept, estimate(job(), "zb-h2").iteration_ms)
    [line] = [line for line in output if line.startswith(f"nothing fits, but with {' '.join(fully)} zb-h1 does (")]
    price = f" and takes {planned / fastest:.3f} times as long as the fastest above would with enough memory"
    assert line.endswith(price)
    assert any("--zero-bubble --zero-bubble-memory-limit auto --zero-bubble-recompute planned" in one for one in output)
    roomy = lines_of(capsys, *chosen, "--", *JOB)
    assert not any("nothing fits" in line for line in roomy)


def test_where_recomputation_does_not_help_either_the_line_says_what_is_missing(capsys):
    output = lines_of(capsys, "--device-memory", "1GiB", "--schedule", "1f1b", "--", *JOB)
    [full, planned] = [line for line in output if "nothing fits either" in line]
    assert "--recompute-num-layers 1 nothing fits either: 1f1b needs " in full
    assert "--zero-bubble-recompute planned nothing fits either: auto needs " in planned
    assert full.endswith(" of 1.00 GiB")
    assert planned.endswith(" of 1.00 GiB")
    assert any(line.startswith("less memory is needed with --use-distributed-optimizer") for line in output)


def test_recomputation_that_the_trainer_refuses_is_no_way_out(capsys):
    flags = ["--device-memory", "1GiB", "--schedule", "1f1b", "--", *JOB, "--use-torch-fsdp2"]
    output = lines_of(capsys, *flags)
    assert not any("nothing fits" in line for line in output)


def test_a_named_schedule_keeps_to_the_given_limit():
    """As in a job, although the name has a limit of its own."""
    free, limited = (
        estimate(job("--zero-bubble-schedule", "v-half", *limit), "v-half") for limit in ((), (LIMIT, "0.4"))
    )
    assert max(limited.activation_bytes) < max(free.activation_bytes)
    assert limited.limit is not None


def test_a_memory_limit_in_which_nothing_fits_is_named(capsys):
    limit = [LIMIT, "1KiB", "--zero-bubble"]
    assert main([*FOUR, "--schedule", "auto", "--", *JOB, *limit]) == 2
    layout, schedule = capsys.readouterr().err.removeprefix("zero-bubble estimate: error: ").split("; ", 1)
    assert layout.startswith(f"{LIMIT} 1KiB: no layout of the layers fits: ")
    assert schedule.startswith(f"--schedule auto: {LIMIT} 1KiB: rank 0 needs at least ")


def test_a_schedule_that_cannot_be_is_a_line_if_others_are_shown_and_an_error_if_nothing_is(capsys):
    odd = [*JOB, "--num-layers", "12"]
    output = lines_of(capsys, "--schedule", "zb-v", "--schedule", "1f1b", "--", *odd)
    assert any(line.startswith("1f1b  ") for line in output)
    assert any(line.startswith("zb-v: --num-layers 12 is not a multiple of the 8 stages") for line in output)
    assert main([*FOUR, "--schedule", "zb-v", "--", *odd]) == 2
    assert "error: --schedule zb-v: --num-layers 12 is not a multiple of the 8 stages" in capsys.readouterr().err
    assert main([*FOUR, "--schedule", "1f1b", "--schedule", "zb-h9", "--", *odd]) == 2
    assert "zb-h9" in capsys.readouterr().err
