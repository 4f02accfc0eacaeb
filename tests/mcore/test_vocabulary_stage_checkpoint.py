"""A checkpoint is the same whether the vocabulary is in shards or not, and loads into models of both kinds."""

from __future__ import annotations

import pytest
from vocabulary_training import Training, run_job

from tests.comparison import differences, tensors

UNTIED = ("--untie-embeddings-and-output-weights",)
STEPS = 2


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="tied"),
        pytest.param(
            (*UNTIED, "--bf16", "--use-distributed-optimizer"),
            id="untied, bf16, distributed optimizer",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_states_go_from_a_whole_vocabulary_to_shards_and_back(flags, tmp_path):
    trainings = {
        "whole": Training(None, is_sharded=False, num_steps=STEPS),
        "shards": Training("zb-h1", num_steps=0, loads="whole"),
        "shards in a V": Training("zb-v", num_steps=0, loads="shards"),
        "whole again": Training(None, is_sharded=False, num_steps=0, loads="shards in a V"),
    }
    run_job(2, trainings, ["--pipeline-model-parallel-size", "2", *flags], tmp_path)
    expected = tensors(tmp_path, "whole", STEPS)
    assert "embedding.word_embeddings.weight" in expected
    assert ("output_layer.weight" in expected) is (UNTIED[0] in flags)
    for name in list(trainings)[1:]:
        assert differences(tensors(tmp_path, name, STEPS), expected) == []
