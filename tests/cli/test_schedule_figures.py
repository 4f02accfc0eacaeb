"""The figures of `zero-bubble schedule` with recomputation in groups of layers, and with costs of vocabulary shards."""

from __future__ import annotations

import json

import pytest

from megatron.zero_bubble.schedule import Placement, StageCosts
from megatron.zero_bubble.schedule.formats import costs_to_json

SIZE = ["--pipeline-size", "4", "--num-microbatches", "8"]


def test_what_is_lost_to_recomputation_includes_the_recomputation_of_groups_in_b(ok):
    blocks = ["--recompute", "full", "--num-blocks", "8", "--memory-limit"]
    small, large = (
        json.loads(ok("simulate", "--schedule", "auto", *SIZE, *blocks, limit, "--json")) for limit in ("1.2", "3")
    )
    assert small["cost"] > large["cost"]
    for figures in (small, large):
        assert figures["lost"] == pytest.approx(1 - 8 * 3 / figures["cost"]), "F, B and W of 8 microbatches take 24"


def test_shards_of_other_ranks_than_the_pipeline_s_are_refused(tmp_path, run):
    """A shard belongs to the first stage of its rank, and operations run only on the shards of the pipeline's ranks."""
    costs = StageCosts.uniform(8).with_shards(Placement("linear", 8), {"time_s": 1})
    (tmp_path / "costs.json").write_text(costs_to_json(costs))
    status, _, error = run("simulate", "--schedule", "zb-v", *SIZE, "--costs", tmp_path / "costs.json")
    assert (status, error.endswith("need --pipeline-size 8, got 4\n")) == (2, True)
