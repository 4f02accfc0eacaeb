"""Costs of the units of a model (the embedding, every layer, and the output), and of stages that consist of units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

from megatron.zero_bubble.schedule.costs import SHARD_TIMES, SMALLEST, StageCosts
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Placement

COLLECTIVES_OF = {"time_e": 1.5, "time_s": 2, "time_t": 0.5, "time_ew": 1}
"""Field of `StageCosts` with the time of an operation on a vocabulary shard -> number of collectives that run directly
before or after the operation. A collective that carries at most one number for each token counts as half a
collective."""

Partition = tuple[int, ...]
"""Stage -> number of layers, in model order. The first stage also has the embedding, and the last stage the output."""


@dataclass(frozen=True)
class UnitCosts:
    """Time and memory of the embedding, a layer or the output of a model for one microbatch, as in `StageCosts`."""

    time_f: float
    time_b: float
    time_w: float
    memory_f: float = 0
    memory_b: float = 0
    memory_w: float = 0
    time_r: float = 0
    memory_r: float = 0
    num_blocks: float = 0
    """Number of separately recomputable blocks of layers: 1 for a layer with recomputation, 0 for other units."""
    state: float = 0
    """Memory of the parameters, gradients and optimizer states of the unit."""
    all_to_all_f: float = 0
    all_to_all_b: float = 0

    @property
    def computing(self) -> UnitCosts:
        """The costs without the time of token exchanges between experts."""
        return replace(
            self,
            time_f=self.time_f - self.all_to_all_f,
            time_b=self.time_b - self.all_to_all_b,
            all_to_all_f=0,
            all_to_all_b=0,
        )


NOTHING = UnitCosts(0, 0, 0)


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model's units (embedding, layers, output), from which the costs of stages are computed."""

    embedding: UnitCosts
    layers: tuple[UnitCosts, ...]
    output: UnitCosts
    """Costs of everything after the layers: layers of multi-token prediction, final norm, output layer and loss."""
    time_comm: float = 0
    """Time of one message between two ranks."""
    ties_output: bool = False
    """Whether the weights of the embedding and the output layer are tied: each has a copy of the same weight."""
    shard: Mapping[str, float] | None = None
    """Field of `StageCosts` -> cost for one vocabulary shard; None without vocabulary shards. With vocabulary shards
    the costs of `embedding` and `output` are zeros."""
    shard_state: float = 0
    """Memory of the parameters, gradients and optimizer states of a vocabulary shard."""
    time_exchange: float = 0
    """Delay of a computation while its rank sends one message and receives another message."""
    time_collective: float = 0
    """Delay of a computation while its rank runs a collective with as much data as a message."""
    latency_collective: float = 0
    """Time of a collective, measured on a waiting rank while the other ranks compute; if 0, `time_comm` is used."""
    time_between: float = 0
    """Additional time between two consecutive operations of a rank."""
    spread: float = 0
    """Half the interquartile range of a measured duration, divided by the median of the duration."""
    fused_backward: float = 0
    """Time of a fused backward, divided by the time of B plus W; 0 if unknown."""

    @property
    def units(self) -> tuple[UnitCosts, ...]:
        """The costs of the embedding, every layer, and the output, in model order."""
        return self.embedding, *self.layers, self.output

    def with_units(self, units: Iterable[UnitCosts]) -> ModelCosts:
        """Replace the costs of the embedding, every layer, and the output by `units`, the new costs in model order."""
        embedding, *layers, output = units
        return replace(self, embedding=embedding, layers=tuple(layers), output=output)

    @property
    def with_cheapest_weight_gradients(self) -> ModelCosts:
        """Costs with W shortened by the time that BW saves; lower bounds from these costs also hold for schedules with
        BW."""
        return self.with_units(replace(unit, time_w=unit.time_w - self.saved_by_fusing(unit)) for unit in self.units)

    def recomputing_in_backward(self) -> ModelCosts:
        """Return the costs of a model whose B recomputes the activations that F drops, without a separate R."""
        return self.with_units(
            replace(
                unit,
                time_b=unit.time_b + unit.time_r,
                memory_f=unit.memory_f - unit.memory_r,
                memory_b=unit.memory_b + unit.memory_r,
                time_r=0.0,
                memory_r=0.0,
                num_blocks=0,
            )
            for unit in self.units
        )

    def saved_by_fusing(self, unit: UnitCosts) -> float:
        """Time by which BW of a unit is shorter than B and W together, limited to half the time of W."""
        share = 1 - (self.fused_backward or 1)
        return min(max(0.0, share) * (unit.time_b + unit.time_w), unit.time_w / 2)

    def vocabulary_parallel(self, num_ranks: int) -> ModelCosts:
        """The costs of the model if the embedding and the output layer are divided into equal shards on all ranks.

        S computes the forward and the input gradient of the output layer for the rows of a shard, and T computes the
        weight gradient of these rows. The activations of the output layer stay in memory until its weight gradient (T)
        is computed.
        """
        embedding, output = self.embedding, self.output
        shard = {
            "time_e": embedding.time_f,
            "time_ew": embedding.time_b + embedding.time_w,
            "time_s": output.time_f + output.time_b,
            "time_t": output.time_w,
            "memory_s": output.memory_f,
            "memory_t": -output.memory_f,
        }
        states = embedding.state + (0 if self.ties_output else output.state)
        of_shard = {
            name: cost / num_ranks + self.time_collective * COLLECTIVES_OF.get(name, 0) for name, cost in shard.items()
        }
        # Costs in which no S takes time are costs without vocabulary shards.
        of_shard["time_s"] = max(of_shard["time_s"], SMALLEST)
        return replace(
            self,
            embedding=NOTHING,
            output=NOTHING,
            shard=of_shard | {"latency_collective": self.latency_collective},
            shard_state=states / num_ranks,
        )

    @property
    def has_all_to_all(self) -> bool:
        """Whether any unit exchanges tokens between experts."""
        return any(unit.all_to_all_f or unit.all_to_all_b for unit in self.units)

    @property
    def computing(self) -> ModelCosts:
        """The costs without the time of token exchanges between experts.

        A pair, which runs a forward and a backward as one operation, may hide the whole time of token exchanges. If the
        time of token exchanges is left out, a lower bound of the iteration time also holds for plans with pairs.
        """
        return self.with_units(unit.computing for unit in self.units)

    @property
    def shard_work(self) -> float:
        """Time of a rank's operations on its vocabulary shard for one microbatch, without the embedding E.

        A rank may run E before its first F could start, and so before the time from which its work is counted.
        """
        times = {*SHARD_TIMES} - {"time_e"}
        return sum(cost for name, cost in self.shard.items() if name in times) if self.shard else 0

    def check(self, partition: Partition, placement: Placement) -> None:
        """Check that a partition divides the layers of the model into the stages of a placement.

        Every stage needs at least one layer, except the first and the last stage of a model without vocabulary shards.

        Raises:
            ScheduleError: the partition does not fit the model and the placement.
        """
        if len(partition) != placement.num_stages:
            raise ScheduleError(
                f"a partition has {len(partition)} stages, but the placement has {placement.num_stages}"
            )
        if sum(partition) != len(self.layers):
            raise ScheduleError(f"a partition has {sum(partition)} layers, but the model has {len(self.layers)}")
        if min(partition) < 0 or not all(partition if self.shard else partition[1:-1]):
            raise ScheduleError(f"a partition has a stage without a layer: {', '.join(map(str, partition))}")

    def of_stages(self, partition: Partition, placement: Placement) -> StageCosts:
        """The costs of the stages of a partition.

        Raises:
            ScheduleError: the partition does not fit the model and the placement.
        """
        self.check(partition, placement)
        stages = list(self._units(partition))
        per_stage = {
            field.name: tuple(sum(getattr(unit, field.name) for unit in units) for units in stages)
            for field in fields(UnitCosts)
            if field.name != "state"
        }
        per_stage["saved_bw"] = tuple(sum(map(self.saved_by_fusing, units)) for units in stages)
        for name in ("time_f", "time_b", "time_w"):
            # The times of a stage without layers may be zero, but times of `StageCosts` have to be above zero.
            # With `SMALLEST` as the first argument, `max` would replace NaN, which `StageCosts` has to refuse.
            per_stage[name] = tuple(max(time, SMALLEST) for time in per_stage[name])
        ranks = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        for name in ("time_f", "time_b"):
            exchanged = [self.time_exchange / 2 * (here != there) for here, there in pairwise(ranks)]
            ends = zip(per_stage[name], [0, *exchanged], [*exchanged, 0], strict=True)
            per_stage[name] = tuple(map(sum, ends))
        comm = tuple(0.0 if here == there else self.time_comm for here, there in pairwise(ranks))
        others = [[unit for unit in units if not unit.num_blocks] for units in stages]
        outside = (sum(unit.memory_f + unit.memory_b for unit in units) for units in others)
        per_stage["memory_outside"] = tuple(
            max(0, memory) * (blocks > 0) for memory, blocks in zip(outside, per_stage["num_blocks"], strict=True)
        )
        costs = StageCosts(time_comm=comm, **per_stage)
        return costs if self.shard is None else costs.with_shards(placement, self.shard)

    def states(self, partition: Partition, placement: Placement) -> tuple[float, ...]:
        """Rank -> memory of parameters, gradients and optimizer states for the rank's stages and vocabulary shard.

        Raises:
            ScheduleError: the partition does not fit the model and the placement.
        """
        self.check(partition, placement)
        stages = [sum(unit.state for unit in units) for units in self._units(partition)]
        return tuple(self.shard_state + own for own in placement.sums(stages))

    def _units(self, partition: Sequence[int]) -> Iterator[list[UnitCosts]]:
        """Yield the units (embedding, layers, output) of each stage."""
        ends = list(accumulate(partition, initial=0))
        for stage, (start, end) in enumerate(pairwise(ends)):
            first, last = stage == 0, stage == len(partition) - 1
            yield [*[self.embedding] * first, *self.layers[start:end], *[self.output] * last]


def with_states(costs: ModelCosts, states: Sequence[float]) -> ModelCosts:
    """Replace the `state` of a model's units by `states`: of the embedding, every layer, and the output."""
    return costs.with_units(replace(unit, state=state) for unit, state in zip(costs.units, states, strict=True))


def spread_layers(num_layers: int, num_stages: int, *, embedding: bool = False, loss: bool = False) -> Partition:
    """Spread layers over stages as evenly as possible.

    If the division leaves a remainder, some stages get one layer fewer. The stages with one layer fewer are chosen in
    this order: the last stage, which has the loss; the first stage, which has the embedding; then the other stages from
    the end.

    Args:
        embedding: whether the embedding takes the place of one layer of the first stage.
        loss: whether the loss takes the place of one layer of the last stage.

    Returns:
        Number of layers of each stage.

    Raises:
        ScheduleError: there are fewer layers than stages. The embedding counts as a layer if `embedding` is set, and
            the loss counts as a layer if `loss` is set.
    """
    few, num_more = divmod(num_layers + embedding + loss, num_stages)
    if few == 0:
        raise ScheduleError(f"{num_layers} layers are not enough for {num_stages} stages of at least one layer")
    by_load = [*range(1, num_stages - 1), *([0] if num_stages > 1 else []), num_stages - 1]
    more = set(by_load[:num_more])
    layers = [few + (stage in more) for stage in range(num_stages)]
    layers[0] -= embedding
    layers[-1] -= loss
    return tuple(layers)
