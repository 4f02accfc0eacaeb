"""Schedule and model both have their vocabulary in shards, or neither has; messages may carry their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from split_layers import HIDDEN, Layers, one_rank

from megatron.zero_bubble.mcore.connections import Connections
from megatron.zero_bubble.mcore.step_call import default_groups
from megatron.zero_bubble.mcore.vocabulary_model import VocabularyShard
from megatron.zero_bubble.mcore.vocabulary_shard import Rows, ShardWeight
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime.communicator import TorchCommunicator
from megatron.zero_bubble.schedule import Placement, ScheduleError

LINEAR = Placement("linear", 1)


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


def test_a_schedule_without_operations_on_the_shards_of_the_model_is_refused() -> None:
    model, rows = Layers(), Rows(0, 4)
    weight = ShardWeight(torch.zeros(rows.count, HIDDEN), rows, {}, num_uses=2)
    model.add_module("vocabulary_shard", VocabularyShard(weight, weight, 0, 1))
    connections = Connections(TorchCommunicator, timedelta(seconds=60), print)
    connections.prepare([model], LINEAR, default_groups())
    try:
        with pytest.raises(
            ScheduleError, match=r"^schedule 1f1b has no operations on vocabulary shards, which the model has$"
        ):
            connections.channels(generate("1f1b", 1, 2), default_groups().pp)
    finally:
        connections.close()


def test_a_schedule_with_operations_on_shards_that_the_model_lacks_is_refused() -> None:
    connections = Connections(TorchCommunicator, timedelta(seconds=60), print)
    connections.prepare([Layers()], LINEAR, default_groups())
    schedule = generate("1f1b", 2, 2, vocabulary_parallel=True)
    with pytest.raises(
        ScheduleError, match=r"^schedule \S+ has operations on vocabulary shards: call shard_vocabulary"
    ):
        connections.channels(schedule, default_groups().pp)


@pytest.mark.parametrize("setting", ["variable_seq_lengths", "mtp_standalone", "enable_hyper_connections", None])
def test_messages_carry_their_shapes_where_the_configuration_does_not_give_them(setting: str | None) -> None:
    model = Layers()
    if setting is not None:
        setattr(model.config, setting, True)
    connections = Connections(TorchCommunicator, timedelta(seconds=60), print)
    connections.prepare([model], LINEAR, default_groups())
    assert connections.shapes_vary is (setting is not None)
