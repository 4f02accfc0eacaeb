"""What the estimate makes of a job's flags: it takes what the job takes, and plans `auto` as the job will."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.cli.estimate import results
from megatron.zero_bubble.cli.estimate.arguments import EstimateFlags
from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import Estimate, estimate
from megatron.zero_bubble.cli.estimate_command import main
from megatron.zero_bubble.cli.invocation import read_flags

ROOT = Path(__file__).parents[2]

GIB = 2**30
TOOL = ["--world-size", "4"]
JOB = ["--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024", "--bf16"]
JOB += ["--micro-batch-size", "2", "--global-batch-size", "32", "--vocab-size", "1000"]
JOB += ["--pipeline-model-parallel-size", "4", "--untie-embeddings-and-output-weights"]
RECOMPUTED = ["--recompute-num-layers", "1"]
LIMIT = "--zero-bubble-memory-limit"


def job(*flags: str) -> EstimatedJob:
    return EstimatedJob.of(read_flags(EstimateFlags, [*TOOL, "--", *JOB, *flags], "estimate", ""))


@pytest.mark.parametrize(
    "flags",
    [
        ["--data-path=some/prefix", "--tokenizer-type=NullTokenizer"],
        ["--train-data-path", "some/prefix", "--valid-data-path=other", "--tokenizer-type", "NullTokenizer"],
        ["--train-iters=500000", "--lr-warmup-iters", "2000"],
        ["--lr-warmup-iters", "2000"],
        ["--lr=6e-4", "--min-lr", "6e-5"],
        ["--min-lr", "6e-5", "--lr-warmup-fraction", "0.01"],
        ["--zero-bubble", LIMIT, "auto"],
        ["--zero-bubble", "--zero-bubble-max-pending-backward", "auto"],
        ["--transformer-impl", "transformer_engine"],
        ["--save", "/proc/on/the/cluster/only", "--save-interval", "1000"],
        ["--log-numerics", "/on/the/cluster/only/numerics.jsonl"],
    ],
    ids=" ".join,
)
def test_what_the_job_takes_is_taken_where_it_will_not_run(flags, capsys):
    assert main([*TOOL, "--schedule", "1f1b", "--", *JOB, *flags]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("nothing", ["0", "0B", "0.0GiB"])
def test_a_device_may_reserve_nothing_and_messages_may_have_no_latency(nothing):
    words = [*TOOL, "--reserved-memory", nothing, "--interconnect-latency", "0", "--", *JOB]
    cluster = EstimatedJob.of(read_flags(EstimateFlags, words, "estimate", "")).cluster
    assert (cluster.reserved_memory, cluster.message_ms(25e6)) == (0, 1)
    with pytest.raises(ValueError, match="argument --device-memory: expected bytes such as 80GiB, got '0B'"):
        read_flags(EstimateFlags, [*TOOL, "--device-memory", "0B", "--", *JOB], "estimate", "")


def test_what_is_given_is_not_given_again():
    args = job("--train-iters=500000", "--lr=6e-4", "--data-path=prefix", "--tokenizer-type=NullTokenizer").args
    assert (args.train_iters, args.lr, args.data_path, args.mock_data) == (500000, 6e-4, ["prefix"], False)


@pytest.mark.exhaustive  # it plans all schedules of a large model
def test_the_attention_that_the_job_runs_is_the_one_estimated(capsys):
    """An 8B model with 8k tokens fits eight devices of 80 GiB because the job's attention is fused."""
    model = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    model += "--ffn-hidden-size 14336 --swiglu --disable-bias-linear --normalization RMSNorm --seq-length 8192 --bf16 "
    model += "--position-embedding-type rope --vocab-size 128256 --untie-embeddings-and-output-weights "
    model += "--attention-dropout 0 --hidden-dropout 0 --pipeline-model-parallel-size 8 --micro-batch-size 1 "
    model += "--global-batch-size 8"

    def fits(*flags: str) -> bool:
        command = ["--world-size", "8", "--json", "--schedule", "1f1b", "--", *model.split(), *flags]
        assert main(command) == 0
        [one] = json.loads(capsys.readouterr().out)["schedules"]
        return bool(one["fits"])

    assert fits()
    assert fits("--transformer-impl", "transformer_engine")
    assert not fits("--transformer-impl", "transformer_engine", "--attention-backend", "unfused")
    assert not fits("--attention-backend", "local")


@pytest.mark.exhaustive  # all schedules and layouts twice
def test_a_large_job_is_planned_in_several_processes_with_the_same_results(monkeypatch, capsys):
    command = ["--json", "--schedule", "zb-h1", "--schedule", "zb-v", "--schedule", "auto", "--", *JOB]
    command += ["--num-layers", "12", "--zero-bubble", "--zero-bubble-post-validation"]
    in_one = lines_of(capsys, *command)
    monkeypatch.setattr(results, "SMALL_JOB", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert lines_of(capsys, *command) == in_one
    assert any("is not a multiple of the 8 stages" in line for line in in_one)


@pytest.mark.exhaustive  # it loads megatron-core in another process
def test_an_estimate_prints_none_of_megatron_cores_warnings():
    command = [*TOOL, "--schedule", "zb-h1", "--", *JOB, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    command[1] = "8"
    program = f"import sys; from {main.__module__} import main; sys.exit(main({command}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stderr == ""


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[Estimate, str]:
    """The schedule `auto`, and the line about it."""
    assert main([*TOOL, "--json", "--schedule", "auto", "--", *JOB, *flags]) == 0
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
    """Every rank may take nine tenths of what the fullest one has free."""
    said, note = planned(capsys, "--zero-bubble", LIMIT, "auto")
    cluster = said.job.cluster
    assert said.limit == int(0.9 * (cluster.device_memory - cluster.reserved_memory - max(said.state_bytes)))
    assert note.endswith("nine tenths of the free memory of the fullest rank, by --zero-bubble-memory-limit auto")


def test_without_a_limit_auto_has_that_of_a_job(capsys):
    unsaid, note = planned(capsys)
    by_default, _ = planned(capsys, "--zero-bubble")
    assert unsaid.limit == by_default.limit
    assert unsaid.timeline.schedule == by_default.timeline.schedule
    assert note.endswith("the peak of megatron-core's own schedule, as a training with --zero-bubble has by default")


def lines_of(capsys: pytest.CaptureFixture[str], *command: str) -> list[str]:
    assert main([*TOOL, *command]) == 0
    return capsys.readouterr().out.splitlines()


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


def room_for(name: str, *flags: str) -> list[str]:
    """A device on which the schedule just fits, with these flags of the job."""
    needed = max(estimate(job(*flags), name).total_bytes) - 3 * GIB
    return ["--device-memory", f"{int(needed) + 1}B", "--reserved-memory", "1B"]


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


def test_a_memory_limit_in_which_nothing_fits_is_named(capsys):
    limit = [LIMIT, "1KiB", "--zero-bubble"]
    assert main([*TOOL, "--schedule", "auto", "--", *JOB, *limit]) == 2
    layout, schedule = capsys.readouterr().err.removeprefix("zero-bubble estimate: error: ").split("; ", 1)
    assert layout.startswith(f"{LIMIT} 1KiB: no layout of the layers fits: ")
    assert schedule.startswith(f"--schedule auto: {LIMIT} 1KiB: rank 0 needs at least ")


def test_a_schedule_that_cannot_be_is_a_line_if_others_are_shown_and_an_error_if_nothing_is(capsys):
    odd = [*JOB, "--num-layers", "12"]
    output = lines_of(capsys, "--schedule", "zb-v", "--schedule", "1f1b", "--", *odd)
    assert any(line.startswith("1f1b  ") for line in output)
    assert any(line.startswith("zb-v: --num-layers 12 is not a multiple of the 8 stages") for line in output)
    assert main([*TOOL, "--schedule", "zb-v", "--", *odd]) == 2
    assert "error: --schedule zb-v: --num-layers 12 is not a multiple of the 8 stages" in capsys.readouterr().err
    assert main([*TOOL, "--schedule", "1f1b", "--schedule", "zb-h9", "--", *odd]) == 2
    assert "zb-h9" in capsys.readouterr().err


def layout_of(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    assert main([*TOOL, "--json", "--schedule", "auto", *command]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_layout_is_the_one_that_a_training_would_choose_and_its_flags_give_the_same_estimate(capsys):
    output = lines_of(capsys, "--schedule", "auto", "--", *JOB, "--zero-bubble", LIMIT, "auto")
    start = next(k for k, line in enumerate(output) if line.startswith(" > layout chosen for 4 ranks and 16 "))
    assert any(line.startswith("     chosen: ") for line in output[start:])
    assert "the same layout in another run: --pipeline-model-parallel-layout " in output[-1]
    layout = layout_of(capsys, "--", *JOB, "--zero-bubble", LIMIT, "auto")["layout"]
    assert layout["flags"] == output[-1].split("another run: ")[1]
    # Units add up to what stages are estimated to need.
    [row] = layout_of(capsys, "--", *JOB, "--zero-bubble", LIMIT, "auto", *shlex.split(layout["flags"]))["schedules"]
    assert row["state_bytes"] == pytest.approx(layout["state_bytes"])
    assert row["imbalance"] == pytest.approx(layout["imbalance"], abs=0.02)
    assert row["iteration_ms"] == pytest.approx(layout["iteration_ms"], rel=0.02)
    assert layout_of(capsys, "--", *JOB)["layout"] is None


@pytest.mark.exhaustive  # all schedules and layouts twice
def test_a_large_job_is_planned_quickly_unless_a_schedule_is_named(capsys, monkeypatch):
    monkeypatch.setattr(results, "LARGE_JOB", 1)
    flags = ["--", *JOB, "--global-batch-size", "96", "--zero-bubble", LIMIT, "auto"]

    def answer(*named: str) -> dict[str, Any]:
        assert main([*TOOL, "--json", *named, *flags]) == 0
        return json.loads(capsys.readouterr().out)

    quick, full = answer(), answer("--schedule", "zb-1p", "--schedule", "zb-v")
    line = "planned with little effort: --schedule NAME plans a large job as its training will"
    assert any(note.startswith(line) for note in quick["notes"])
    assert not any("little effort" in note for note in full["notes"])
    rows = {row["schedule"]: row for row in quick["schedules"]}
    for row in [*full["schedules"], full["layout"]]:
        other = quick["layout"] if row is full["layout"] else rows[row["schedule"]]
        # Of layouts that differ by less than 2% the simplest is chosen, so that a shorter plan may change the choice.
        assert other["iteration_ms"] == pytest.approx(row["iteration_ms"], rel=0.04 if row is full["layout"] else 0.02)
        assert other["bubble_rate"] == pytest.approx(row["bubble_rate"], abs=0.02)
    output = lines_of(capsys, *flags)
    assert any(line.startswith(" > layout chosen for 4 ranks and 48 microbatches") for line in output)


@pytest.mark.exhaustive  # the layouts of two jobs
def test_where_no_schedule_is_possible_or_fits_the_layout_is_the_way_out(capsys):
    tight = room_for("1f1b", "--recompute-granularity", "full", "--recompute-method", "uniform", *RECOMPUTED)
    output = lines_of(capsys, *tight, "--schedule", "1f1b", "--", *JOB, "--zero-bubble")
    [line] = [line for line in output if line.startswith("nothing fits, but with --pipeline-model-parallel-layout ")]
    assert "--zero-bubble-recompute planned --zero-bubble-memory-limit auto auto does (" in line
    odd = [*JOB, "--num-layers", "30", "--zero-bubble"]
    answer = layout_of(capsys, "--", *odd)
    assert answer["schedules"] == []
    assert "--num-layers 30 is not a multiple of the" in answer["refused"]["auto"]
    assert sum(answer["layout"]["partition"]) == 30
    assert min(answer["parameters_per_rank"]) > 0


DEEPSEEK_V3 = shlex.split(
    """
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --seq-length 4096 --bf16
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --mtp-num-layers 1 --num-experts 256 --moe-ffn-hidden-size
    2048 --moe-layer-freq '([0]*3+[1]*58)' --moe-router-topk 8 --moe-shared-expert-intermediate-size 2048
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --untie-embeddings-and-output-weights
    --vocab-size 129279 --attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 8 --expert-model-parallel-size 64 --micro-batch-size 1 --global-batch-size 1024
    --use-distributed-optimizer --recompute-granularity selective --recompute-modules mla_up_proj mlp moe_act
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --pipeline-model-parallel-layout 'Et|(tt|)*30mL'
    --zero-bubble --zero-bubble-placement interleaved
    """
)
OVERLAP = "--overlap-moe-expert-parallel-comm"


def deepseek_v3(*flags: str) -> EstimatedJob:
    """The recipe's layout: the embedding and one layer, 30 stages of two layers, and the prediction layer."""
    cluster = ["--world-size", "1024", "--device-tflops", "989", "--expert-bandwidth", "50"]
    return EstimatedJob.of(read_flags(EstimateFlags, [*cluster, "--", *DEEPSEEK_V3, *flags], "estimate", ""))


def test_messages_between_experts_take_what_their_bytes_take():
    layers = deepseek_v3(OVERLAP).costs.layers
    tokens = 4096 / 2 * 8 * 63 / 64  # of a tensor-parallel rank, to eight experts each, one in 64 of which are its own
    milliseconds = 2 * (0.02 + tokens * 7168 * 2 / 50e9 * 1e3)
    assert [layer.all_to_all_f for layer in layers] == [0] * 3 + [pytest.approx(milliseconds)] * 58
    assert [layer.all_to_all_b for layer in layers] == [layer.all_to_all_f for layer in layers]


def test_overlapping_them_makes_deepseek_v3_faster():
    alone, overlapped = (estimate(deepseek_v3(*flags), "auto") for flags in ((), (OVERLAP,)))
    megatrons = estimate(deepseek_v3(OVERLAP), "interleaved-pairs")
    assert alone.gain_of_pairs is None
    assert overlapped.gain_of_pairs > 1.15
    assert overlapped.iteration_ms <= megatrons.iteration_ms * (1 + 1e-9)
    assert max(overlapped.activation_bytes) <= max(megatrons.activation_bytes) * (1 + 1e-9)


def test_what_pairs_do_not_work_with_is_refused(capsys):
    flags = ["--num-experts", "8", "--disable-bias-linear", OVERLAP]
    assert main([*TOOL, "--", *JOB, *flags]) == 2
    assert "does not work with --expert-model-parallel-size 1" in capsys.readouterr().err
    assert "--untie-embeddings-and-output-weights" in DEEPSEEK_V3
    tied = [flag for flag in DEEPSEEK_V3 if flag != "--untie-embeddings-and-output-weights"]
    assert main(["--world-size", "1024", "--", *tied, OVERLAP]) == 2
    assert "give --untie-embeddings-and-output-weights" in capsys.readouterr().err


@pytest.mark.exhaustive  # test_layout_choice.py has the choice; this test searches four times
def test_a_layout_that_megatrons_flags_fix_is_compared_with_all_others(capsys):
    """A V is predicted 2% faster than two interleaved chunks; with a large vocabulary shards on these are the best."""
    given = "--num-layers-per-virtual-pipeline-stage 1"
    flags = ["--", *JOB, "--zero-bubble", *given.split()]
    assert main([*TOOL, "--schedule", "1f1b", "--json", *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    other = answer["freed_layout"]
    assert "--zero-bubble-placement v" in other["flags"]
    assert "--zero-bubble-placement interleaved" in answer["layout"]["flags"]
    assert any(
        note.startswith(f"without {given} --zero-bubble would choose another layout, ") for note in answer["notes"]
    )
    assert main([*TOOL, "--schedule", "1f1b", *flags, "--vocab-size", "120000"]) == 0
    assert f"no layout is predicted to be 2% faster than with {given}" in capsys.readouterr().out
