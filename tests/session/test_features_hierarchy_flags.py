"""`--hierarchical-sgd` is refused in one line where it cannot work."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.schedule.hierarchy import Hierarchy
from tests.checked_flags import checked_job

P2 = {"--pipeline-model-parallel-size": "2"}
"""On eight ranks, four replicas."""


def test_a_hierarchy_of_all_replicas_is_taken():
    job = checked_job({**P2, "--hierarchical-sgd": "2:2,8:4", "--hierarchical-sgd-warmup": "10"}, world_size=8)
    assert job.hierarchy == Hierarchy.parse("2:2,8:4", warmup=10)
    assert checked_job(P2, world_size=8).hierarchy is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"--hierarchical-sgd": "2by2"},
            "--hierarchical-sgd 2by2: give PERIOD:SIZE,PERIOD:SIZE,..., as in 2:2,4:4,8:8",
        ),
        (
            {"--hierarchical-sgd": "4:2,2:4"},
            "--hierarchical-sgd 4:2,2:4: period 2 comes after 4: periods must increase with the groups",
        ),
        (
            {"--hierarchical-sgd": "2:2"},
            "--hierarchical-sgd 2:2 ends with groups of 2, and the job has 4 data-parallel replicas: the last group "
            "must be all of them, as in 4:4",
        ),
        (
            {"--hierarchical-sgd": "2:4", "--pipeline-model-parallel-size": "8"},
            "--hierarchical-sgd 2:4 needs several data-parallel replicas, and 8 ranks make one: start more ranks, or "
            "leave the flag out",
        ),
        ({"--hierarchical-sgd-warmup": "5"}, "--hierarchical-sgd-warmup 5 needs --hierarchical-sgd"),
        (
            {"--hierarchical-sgd": "2:4", "--hierarchical-sgd-warmup": "-1"},
            "--hierarchical-sgd-warmup must be at least 0, got -1",
        ),
        (
            {"--hierarchical-sgd": "2:4", "--use-distributed-optimizer": None},
            "--hierarchical-sgd does not work with --use-distributed-optimizer: each replica keeps a shard of the "
            "others' parameters, so no replica can step alone; leave it out",
        ),
        (
            {"--hierarchical-sgd": "2:4", "--fp16": None},
            "--hierarchical-sgd does not work with --fp16: every replica would have a loss scale of its own; use "
            "--bf16",
        ),
        (
            {"--hierarchical-sgd": "2:4", "--calculate-per-token-loss": None},
            "--hierarchical-sgd does not work with --calculate-per-token-loss: the number of tokens is summed over "
            "replicas in every step; leave it out",
        ),
        (
            {
                "--hierarchical-sgd": "2:4",
                "--num-experts": "4",
                "--disable-bias-linear": None,
                "--expert-model-parallel-size": "2",
            },
            "--hierarchical-sgd does not work with --expert-model-parallel-size 2: replicas share experts, so no "
            "replica can step alone; use 1",
        ),
    ],
)
def test_what_cannot_work_is_refused(flags, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        checked_job({**P2, **flags}, world_size=8)
    assert str(error.value) == message
