"""Optimizers whose parameters cannot be averaged over replicas are refused."""

from __future__ import annotations

from datetime import timedelta

import pytest
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

from megatron.zero_bubble.mcore.replica_averaging import ReplicaAveraging
from megatron.zero_bubble.schedule.hierarchy import Hierarchy


class LayerWise(ChainedOptimizer):
    """As megatron-core's LayerWiseDistributedOptimizer: each replica steps its own layers."""


def test_an_optimizer_that_divides_layers_among_replicas_is_refused() -> None:
    optimizer = object.__new__(LayerWise)
    optimizer.chained_optimizers = [object.__new__(FP32Optimizer)]
    hierarchy = Hierarchy.parse("2:2")
    with pytest.raises(ValueError, match="parameters of megatron-core's LayerWise cannot be averaged"):
        ReplicaAveraging(hierarchy, optimizer, [], 0, timedelta(seconds=1), lambda: None)
