"""A job that stands still ends by itself, and says where every rank is."""

from __future__ import annotations

import re

import pytest

from megatron.zero_bubble.runtime.watchdog import RankState, Stall
from megatron.zero_bubble.session.stalls import check_stall_timeout, describe, stall_timeout
from megatron.zero_bubble.trainer.arguments import Arguments, parse_arguments
from tests.launch import ROOT, TINY_GPT, run


@pytest.mark.exhaustive  # the tests of runtime/test_watchdog.py find the operation
def test_a_rank_that_hangs_is_named_with_its_operation_and_the_job_ends() -> None:
    flags = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "100")
    result = run(
        2, ROOT / "tests" / "training_that_hangs.py", *TINY_GPT, *flags,
        "--zero-bubble-schedule", "zb-h1", "--zero-bubble-timeout", "8",
    )  # fmt: skip
    assert result.returncode != 0
    assert "iteration        2/" in result.stdout
    assert "iteration        3/" not in result.stdout
    (block,) = re.findall(r"pretrain_gpt.py: error: the pipeline hangs:(?:.*\n)(?:    .*\n)+", result.stderr)
    assert "(--zero-bubble-timeout). Schedule zb-h1" in block
    assert re.search(r"    rank 0 on \S+, process \d+, for \d+\.\d s: waits for the input of B0, operation \d+", block)
    assert re.search(
        r"    rank 1 on \S+, process \d+, for \d+\.\d s: computes F0, operation \d+ of \d+ in step 3", block
    )
    assert "[B0]" in block
    assert "[F0]" in block
    assert "in hang, training_that_hangs.py:" in block
    assert re.search(r"    look first at: rank 1 on \S+, which computes F0", block)
    # By itself, or by torchrun, which is as fast as the ranks are.
    assert len(re.findall(r"exitcode +: (?:1|-15) ", result.stderr)) == 2, result.stderr


def state(rank: int, where: str, *, excerpt: str = "rank 0: F0 [F1]", computes: bool = False) -> RankState:
    return RankState(rank, "n1", 100 + rank, 30.0 + rank, where, excerpt, "wait, distributed.py:5", computes)


def block(*states: RankState | None) -> list[str]:
    return describe(Stall("zb-h1", 30.0, 0, states)).splitlines()


def test_the_block_has_two_lines_a_rank() -> None:
    lines = block(state(0, "waits for the input of B0"), state(1, "computes F1", computes=True))
    assert lines[0].startswith("the pipeline hangs: rank 0 has been at one operation for 30 s")
    assert lines[1] == "    rank 0 on n1, process 100, for 30.0 s: waits for the input of B0"
    assert lines[2] == "        rank 0: F0 [F1]; in wait, distributed.py:5"
    assert lines[5] == "    look first at: rank 1 on n1, which computes F1"
    assert len(lines) == 6


def test_where_to_look_first() -> None:
    waiting, computing = state(0, "waits for the input of B0"), state(1, "computes F1", computes=True)
    outside = state(2, "is between two steps", excerpt="")
    assert block(waiting, None, computing)[-1].endswith("rank 1, which does not answer")
    assert block(waiting, computing, outside)[-1].endswith(
        "rank 1 on n1, which computes F1; rank 2 on n1, which is between two steps"
    )
    assert block(waiting, waiting)[-1].endswith("the network, because all ranks wait for messages")


def test_a_silent_rank_has_one_line() -> None:
    assert block(state(0, "computes F1", computes=True), None)[3].startswith("    rank 1 does not answer")


def flags(*more: str) -> Arguments:
    return parse_arguments([*TINY_GPT, "--zero-bubble", *more])


def test_the_watchdog_speaks_before_a_collective_gives_up() -> None:
    """The watchdog names the operation that hangs; the timeout of a collective names only an address."""
    assert stall_timeout(flags()) == 540.0
    assert stall_timeout(flags("--distributed-timeout-minutes", "1")) == 54.0
    check_stall_timeout(flags("--zero-bubble-timeout", "599"))
    check_stall_timeout(flags("--zero-bubble-timeout", "0"))
    with pytest.raises(ValueError, match=r"^--zero-bubble-timeout 600 must be below --distributed-timeout-minutes 10 "):
        check_stall_timeout(flags("--zero-bubble-timeout", "600"))
    for wrong in ("-1", "nan", "inf"):
        with pytest.raises(ValueError, match=rf"^--zero-bubble-timeout must be at least 0, got {wrong}"):
            check_stall_timeout(flags("--zero-bubble-timeout", wrong))
