"""Forwards of several chunks keep megatron-core's order where random numbers depend on it and memory allows."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.session.plans import other_numbers_line
from tests.checked_flags import checked_job

EXPERTS = {"--num-experts": "4", "--disable-bias-linear": None}


@pytest.mark.parametrize(
    ("dropout", "group", "size", "more"),
    [
        (("0", "0"), None, None, {}),
        (("0.1", "0"), None, 2, {}),
        (("0", "0.1"), None, 2, {}),
        (("0.1", "0.1"), None, None, {"--zero-bubble-seed-by-layer": None}),
        (("0", "0"), "4", 4, {}),
        (("0", "0"), None, 2, {**EXPERTS, "--moe-input-jitter-eps": "0.01"}),
        (("0", "0"), None, None, EXPERTS),
    ],
)
def test_forwards_of_several_chunks_keep_their_order_where_dropout_depends_on_it(dropout, group, size, more):
    changes = {
        "--pipeline-model-parallel-size": "2",
        "--num-virtual-stages-per-pipeline-rank": "2",
        "--microbatch-group-size-per-virtual-pipeline-stage": group or "",
        "--global-batch-size": "8",
        "--zero-bubble": None,
        "--attention-dropout": dropout[0],
        "--hidden-dropout": dropout[1],
        **more,
    }
    assert checked_job(changes, world_size=2).plan.request.group_size == size


UNDROPPED = {"--attention-dropout": "0", "--hidden-dropout": "0"}
RANDOM_ROUTES = {"--num-experts": "2", "--disable-bias-linear": None, "--moe-router-force-load-balancing": None}


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, False),
        ({"--zero-bubble-memory-limit": "0.5"}, True),
        ({"--zero-bubble-memory-limit": "0.5", "--zero-bubble-seed-by-layer": None}, False),
        ({"--zero-bubble-memory-limit": "0.5", **UNDROPPED}, False),
        ({"--zero-bubble-memory-limit": "0.5", **UNDROPPED, **RANDOM_ROUTES}, True),
    ],
)
def test_a_line_says_that_dropout_draws_other_numbers_than_megatron_cores_order(changes, warns):
    """The promise that numbers are equal holds in megatron-core's order of forwards, which needs its memory."""
    chunks = {"--zero-bubble": None, "--zero-bubble-keep-layout": None, "--num-virtual-stages-per-pipeline-rank": "2"}
    job = checked_job({**chunks, "--global-batch-size": "16", **changes})
    line = other_numbers_line(job.flags, job.plan.schedule(job.flags.most_microbatches))
    assert bool(line) is warns
    if warns:
        assert line.startswith(" > --zero-bubble-memory-limit 0.5: megatron-core's order of forwards, in groups of 4 ")


@pytest.mark.parametrize(
    ("schedule", "size", "most"), [("auto", 1, ""), ("interleaved-zb", 3, True), ("interleaved-zb", 9, True)]
)
def test_a_group_of_microbatches_of_an_impossible_size_is_refused_by_its_flag(schedule, size, most):
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    chunks = {"--zero-bubble-schedule": schedule, "--num-virtual-stages-per-pipeline-rank": "2"}
    with pytest.raises(ValueError, match=rf"^{flag} {size}: give at least 4, the number of pipeline ranks") as error:
        checked_job({**chunks, "--global-batch-size": "16", flag: str(size)})
    assert str(error.value).endswith(", and at most 8, the number of microbatches") is bool(most)
