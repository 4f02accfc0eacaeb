"""The estimate takes the flags that a job takes, and estimates the job that they describe."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from estimated_jobs import FOUR
from flagged_job import JOB, LIMIT, job, lines_of

from megatron.zero_bubble.cli.estimate import results
from megatron.zero_bubble.cli.estimate.arguments import EstimateFlags
from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate_command import main
from megatron.zero_bubble.cli.invocation import read_flags
from tests.launch import ROOT


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
    assert main([*FOUR, "--schedule", "1f1b", "--", *JOB, *flags]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("nothing", ["0", "0B", "0.0GiB"])
def test_a_device_may_reserve_nothing_and_messages_may_have_no_latency(nothing):
    words = [*FOUR, "--reserved-memory", nothing, "--interconnect-latency", "0", "--", *JOB]
    cluster = EstimatedJob.of(read_flags(EstimateFlags, words, "estimate", "")).cluster
    assert (cluster.reserved_memory, cluster.message_ms(25e6)) == (0, 1)
    with pytest.raises(ValueError, match="argument --device-memory: expected bytes such as 80GiB, got '0B'"):
        read_flags(EstimateFlags, [*FOUR, "--device-memory", "0B", "--", *JOB], "estimate", "")


@pytest.mark.parametrize("flags", [["--attention-backend", "local"], ["--attention-backend=local"]])
def test_local_attention_is_of_local_layers(flags):
    assert job(*flags).args.transformer_impl == "local"


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
    command = [*FOUR, "--schedule", "zb-h1", "--", *JOB, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    command[1] = "8"
    program = f"import sys; from {main.__module__} import main; sys.exit(main({command}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stderr == ""
