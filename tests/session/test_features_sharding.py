"""Flags that spread the vocabulary over all ranks, and what they refuse."""

import re

import pytest

from megatron.zero_bubble.session.features import check_shards, may_spread
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.settings import job_settings


def flags(**given: object) -> JobFlags:
    known = {"pipeline_model_parallel_size": 3, "num_layers": 6, "global_batch_size": 6, "world_size": 3}
    return JobFlags(**{"zero_bubble_schedule": "zb-h1", **known, **given})


def test_the_plan_spreads_the_vocabulary_if_the_flag_says_so() -> None:
    for value, spreads in (("on", True), ("off", False), (None, False)):
        plan = job_settings(flags(zero_bubble_vocabulary_parallel=value), {}, has_cuda=False).plan
        assert plan is not None
        assert plan.schedule(6).is_vocabulary_parallel is spreads


def test_a_layout_is_not_searched_with_shards_that_would_need_one_length() -> None:
    assert may_spread(flags(), 384) is None
    assert may_spread(flags(variable_seq_lengths=True), 384) is False


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"zero_bubble_vocabulary_parallel": "on", "mtp_num_layers": 1},
            "--zero-bubble-vocabulary-parallel on does not work with --mtp-num-layers 1: "
            "its losses need the whole output layer on one rank; leave it out",
        ),
        (
            {"zero_bubble_vocabulary_parallel": "auto"},
            "--zero-bubble-vocabulary-parallel auto needs a layout that zero bubble chooses, but other flags fix it: "
            "use on or off",
        ),
        (
            {"zero_bubble_schedule": None, "zero_bubble_vocabulary_parallel": "on"},
            "--zero-bubble-vocabulary-parallel needs --zero-bubble or --zero-bubble-schedule",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(given: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        job_settings(flags(**given), {}, has_cuda=False)


def test_a_vocabulary_that_does_not_divide_is_refused_with_a_divisor_that_works() -> None:
    check_shards(flags(), 50304 + 1)
    check_shards(flags(zero_bubble_vocabulary_parallel="on"), 384)
    line = (
        "--zero-bubble-vocabulary-parallel on: a padded vocabulary of 50432 does not divide into shards for "
        "3 pipeline x 2 tensor ranks: --make-vocab-size-divisible-by 384 makes it do so"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        check_shards(flags(zero_bubble_vocabulary_parallel="on", tensor_model_parallel_size=2), 50432)
