"""Sizes that cannot work are refused at once; without the checks each of these is silent for minutes, or for ever."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from megatron.zero_bubble.session import plans
from megatron.zero_bubble.session.plans import check_plan, choose_plan
from megatron.zero_bubble.trainer import data_config, size_checks
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.defaults import with_vocabulary
from megatron.zero_bubble.trainer.pretrain import make_data_config
from megatron.zero_bubble.trainer.size_checks import check_memory
from megatron.zero_bubble.trainer.tokenizer import load_tokenizer
from tests.checked_flags import checked, checked_job

HUGE = str(10**9)
PLANNED = {"--zero-bubble": None, "--global-batch-size": "16"}
LAYOUT = "--pipeline-model-parallel-layout"


def all_checks(changes: dict[str, str | None], world_size: int = 4) -> Arguments:
    """Run the checks that `pretrain` runs before any process group exists, and return the arguments."""
    args = checked(changes, world_size=world_size)
    tokenizer = load_tokenizer(args)
    args = with_vocabulary(args, tokenizer.vocab_size)
    check_memory(args)
    make_data_config(args).validate(tokenizer.vocab_size)
    return args


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--train-iters": str(10**30)}, f"--train-iters: {10**30} is beyond 64 bits"),
        ({"--train-iters": str(10**18)}, rf"--train-iters {10**18} .*: an index of \d+ train samples takes .* GiB"),
        ({"--eval-iters": str(10**18)}, rf"--eval-iters {10**18} .*: an index of \d+ valid samples takes .* GiB"),
        ({"--global-batch-size": str(10**12)}, f"--global-batch-size {10**12} .*: {10**12 // 2} microbatches are too"),
        (
            {"--global-batch-size": str(10**12), "--rampup-batch-size": "2 2 1000"},
            f"--global-batch-size {10**12} .* --rampup-batch-size 2 2 1000: iterations of every size, .* too many",
        ),
        ({"--num-layers": HUGE}, f"--num-layers {HUGE} .*: parameters and gradients take at least .* GiB on a rank"),
        ({"--hidden-size": HUGE}, f"--hidden-size {HUGE} .*: parameters and gradients take at least"),
        ({"--ffn-hidden-size": str(10**12)}, f"--ffn-hidden-size {10**12}: parameters and gradients take at least"),
        ({"--num-experts": HUGE, "--disable-bias-linear": None}, f"--num-experts {HUGE}: parameters and gradients"),
        ({"--mtp-num-layers": HUGE}, f"--mtp-num-layers {HUGE} .*: parameters and gradients take at least"),
        ({"--vocab-size": str(10**12)}, r"a vocabulary of 1\d{12} .*: embeddings and their gradients take"),
        ({"--max-position-embeddings": str(10**12)}, f"positions up to {10**12}: embeddings and their gradients take"),
        ({"--seq-length": "3000000"}, "--seq-length 3000000 .*: the attention scores of a layer take at least"),
        (
            {"--micro-batch-size": str(10**12), "--global-batch-size": str(10**12)},
            f"--micro-batch-size {10**12} .*: hidden states take at least",
        ),
        ({"--num-virtual-stages-per-pipeline-rank": HUGE}, f"{HUGE} x .* more stages than --num-layers 8"),
        ({LAYOUT: f"Et*{HUGE}|L"}, f"repeats something {HUGE} times: at most 10000"),
        ({LAYOUT: f"E(t|)*{'9' * 5000}L"}, "repeats something 9+ times: at most 10000"),
        ({"--seed": "4294967296"}, r"--seed must be at most \d+ on these ranks, got 4294967296"),
        ({"--distributed-timeout-minutes": str(10**15)}, "--distributed-timeout-minutes must be at most 1000000"),
        ({"--zero-bubble-memory-limit": "1e308"}, "--zero-bubble-memory-limit: '1e308' is not a memory limit"),
    ],
)  # fmt: skip
def test_a_size_that_cannot_work(changes: dict[str, str | None], words: str) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        all_checks(PLANNED | changes)
    assert re.search(words, str(error.value))
    assert time.monotonic() - start < 5


GPT_175B = {
    "--num-layers": "96", "--hidden-size": "12288", "--num-attention-heads": "96", "--seq-length": "2048",
    "--vocab-size": "51200", "--tensor-model-parallel-size": "8", "--pipeline-model-parallel-size": "8",
    "--micro-batch-size": "1", "--global-batch-size": "1536", "--train-iters": "500000", "--bf16": None,
    "--zero-bubble-schedule": "1f1b",
}  # fmt: skip


def test_what_people_train_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-175B is accepted on 64 devices of 80 GiB, where its index takes 9 GiB, and refused on devices of 8 GiB."""
    monkeypatch.setattr(size_checks, "_memory", lambda: (80 * 2**30, "a device"))
    monkeypatch.setattr(data_config, "host_memory", lambda: 80 * 2**30)
    args = all_checks(GPT_175B, world_size=64)
    monkeypatch.setattr(size_checks, "_memory", lambda: (8 * 2**30, "a device"))
    message = r"^--num-layers 96 .*: parameters and gradients take at least 10 GiB on a rank, and a device has 8$"
    with pytest.raises(ValueError, match=message):
        check_memory(args)
    monkeypatch.setattr(data_config, "host_memory", lambda: 8 * 2**30)
    with pytest.raises(ValueError, match=r"an index of 768000000 train samples takes 9 GiB, and this machine has 8$"):
        make_data_config(args).validate()


def test_planning_that_takes_long_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = checked_job(PLANNED).flags
    for seconds, rank, said in (
        (5.0, 0, ""),
        (0.0, 1, ""),
        (0.0, 0, " > planning schedule auto for up to 8 microbatches\n"),
    ):
        monkeypatch.setattr(plans, "SILENT_SECONDS", seconds)
        asked = replace(flags, rank=rank)
        check_plan(asked, choose_plan(asked))
        assert capsys.readouterr().out == said
