"""Costs of a model's units before it is cut into stages: the embedding, every layer, and the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

from megatron.zero_bubble.schedule.costs import SMALLEST, StageCosts
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Placement

Partition = tuple[int, ...]
"""Layers of every stage, in model order. The embedding is in the first stage, the output in the last."""


@dataclass(frozen=True)
class UnitCosts:
    """Time and memory of one unit of a model for one microbatch, in the units and with the signs of `StageCosts`."""

    time_f: float
    time_b: float
    time_w: float
    memory_f: float = 0
    memory_b: float = 0
    memory_w: float = 0
    time_r: float = 0
    memory_r: float = 0
    state: float = 0
    """Memory of the unit's parameters, gradients and optimizer states, which is held all the time."""


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model's units in model order, from which those of any stages follow.

    `output` has everything after the layers: the layers of multi-token prediction, the final norm, the output layer
    and the loss. `time_comm` is the time of one message between two ranks.
    """

    embedding: UnitCosts
    layers: tuple[UnitCosts, ...]
    output: UnitCosts
    time_comm: float = 0

    def check(self, partition: Partition, placement: Placement) -> None:
        """Raise `ScheduleError` unless `partition` cuts the layers into the stages of `placement`.

        Only the stages of the embedding and of the output may be without a layer.
        """
        if len(partition) != placement.num_stages:
            raise ScheduleError(
                f"a partition has {len(partition)} stages, but the placement has {placement.num_stages}"
            )
        if sum(partition) != len(self.layers):
            raise ScheduleError(f"a partition has {sum(partition)} layers, but the model has {len(self.layers)}")
        if min(partition) < 0 or not all(partition[1:-1]):
            raise ScheduleError(f"a partition has a stage without a layer: {', '.join(map(str, partition))}")

    def of_stages(self, partition: Partition, placement: Placement) -> StageCosts:
        """The costs of the stages that `partition` makes. Raises `ScheduleError` if it does not fit."""
        self.check(partition, placement)
        stages = list(self._units(partition))
        per_stage = {
            field.name: tuple(sum(getattr(unit, field.name) for unit in units) for units in stages)
            for field in fields(UnitCosts)
            if field.name != "state"
        }
        for name in ("time_f", "time_b", "time_w"):
            # A stage with the embedding alone computes next to nothing, but a cost must be above zero.
            per_stage[name] = tuple(max(SMALLEST, time) for time in per_stage[name])
        ranks = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        comm = tuple(0.0 if here == there else self.time_comm for here, there in pairwise(ranks))
        return StageCosts(time_comm=comm, **per_stage)

    def states(self, partition: Partition, placement: Placement) -> tuple[float, ...]:
        """Rank -> memory of the parameters, gradients and optimizer states of its stages."""
        return placement.sums([sum(unit.state for unit in units) for units in self._units(partition)])

    def _units(self, partition: Sequence[int]) -> Iterator[list[UnitCosts]]:
        """The units of every stage."""
        ends = list(accumulate(partition, initial=0))
        for stage, (begin, end) in enumerate(pairwise(ends)):
            first, last = stage == 0, stage == len(partition) - 1
            yield [*[self.embedding] * first, *self.layers[begin:end], *[self.output] * last]


def with_states(costs: ModelCosts, states: Sequence[float]) -> ModelCosts:
    """The same costs with this memory of the states of the embedding, of every layer and of the output, in order."""
    units = (costs.embedding, *costs.layers, costs.output)
    embedding, *layers, output = (replace(unit, state=state) for unit, state in zip(units, states, strict=True))
    return replace(costs, embedding=embedding, layers=tuple(layers), output=output)


def even_partition(num_layers: int, num_stages: int) -> Partition:
    """Megatron's split: the same number of layers on every stage. Raises `ScheduleError` if they do not divide."""
    if num_layers % num_stages:
        raise ScheduleError(f"{num_layers} layers do not divide into {num_stages} stages of the same size")
    return (num_layers // num_stages,) * num_stages
