"""Derives the costs of a model's embedding, layers and output from the profile of a run with any partition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from megatron.zero_bubble.runtime.least_squares import nonnegative_least_squares
from megatron.zero_bubble.schedule import ScheduleError
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.model_costs import ModelCosts, Partition, UnitCosts
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import partition_of_flags
from megatron.zero_bubble.session.model_states import element_bytes

_TYPES = {
    "num_layers": int,
    "pipeline_model_parallel_layout": str,
    "hybrid_layer_pattern": str,
    "decoder_first_pipeline_num_layers": int,
    "decoder_last_pipeline_num_layers": int,
}
"""Name of a setting that determines the partition -> type of its value, which may also be None."""


def partition_of_profile(profile: Profile) -> Partition:
    """The number of layers of every stage of the profiled run.

    Raises:
        ScheduleError: the settings in the profile have the wrong types, or do not fit the profile's placement.
    """
    for name, kind in _TYPES.items():
        value = profile.model.get(name)
        if value is not None and type(value) is not kind:
            raise ScheduleError(f"the profile's {name} must be of type {kind.__name__}, got {value!r}")
    flags = JobFlags.of(SimpleNamespace(**profile.model), pipeline_model_parallel_size=profile.placement.num_ranks)
    if flags.pipeline_model_parallel_layout is not None:
        # The job may have made this layout from the flags for the layers of the first and the last stage.
        flags = replace(flags, decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None)
    try:
        return partition_of_flags(flags, profile.placement)
    except ValueError as error:
        raise ScheduleError(f"the number of layers of the profile's stages is unknown: {error}") from error


def fit_units(profile: Profile, kinds: Sequence[int] | None = None) -> ModelCosts:
    """Return the costs of embedding, layers and output that fit the profile's stage costs by least squares.

    The costs of a stage are the sum of the costs of its layers; the first stage also has the embedding, and the last
    stage also has the output. A profile of two stages does not determine the costs of the embedding; the costs of the
    embedding are then zero. If the stages do not determine the costs of each kind of layer, all layers get the same
    costs. Costs are never negative. The field `state` of the costs is zero, because a profile records no model states.
    If the profile has no recomputation, R of a layer is assumed to take the time of F and to restore all activations
    that F stores, except the layer's input. If the profiled run had vocabulary shards, the embedding and the output
    have the costs of all shards together.

    Args:
        kinds: for each layer, the index of its kind, from 0; by default all layers are of one kind.

    Raises:
        ScheduleError: the profile has one stage, or the profile's layers do not fit its placement.
    """
    partition = partition_of_profile(profile)
    fit = _Fit.of(partition, kinds or [0] * sum(partition))
    costs = profile.costs
    after_b = np.add(costs.memory_f, costs.memory_b)
    after_w = np.add(after_b, costs.memory_w)
    times, exchanges = (costs.time_f, costs.time_b, costs.time_w), (costs.all_to_all_f, costs.all_to_all_b)
    fitted = map(fit.solve, (*times, costs.memory_f, after_b, after_w, *exchanges))
    embedding, *layers, output = (
        UnitCosts(
            *(f, b, w, after_f, after_b - after_f, after_w - after_b),
            all_to_all_f=min(f, exchange_f),
            all_to_all_b=min(b, exchange_b),
        )
        for f, b, w, after_f, after_b, after_w, exchange_f, exchange_b in zip(*fitted, strict=True)
    )
    embedding, output = map(_sum, (embedding, output), costs.whole_vocabulary)
    if any(costs.time_r):
        time_r, memory_r, num_blocks = map(fit.solve_layers, (costs.time_r, costs.memory_r, costs.num_blocks))
        layers = [
            replace(layer, time_r=time, memory_r=restored, num_blocks=number)
            for layer, time, restored, number in zip(layers, time_r, memory_r, num_blocks, strict=True)
        ]
    else:
        kept = _layer_input_bytes(profile)
        layers = [
            replace(layer, time_r=layer.time_f, memory_r=max(0.0, layer.memory_f - kept), num_blocks=1)
            for layer in layers
        ]
    saved = sum(costs.saved_bw) / sum(map(sum, (costs.time_b, costs.time_w)))
    fused = 1 - saved if saved else 0.0  # unknown
    return ModelCosts(embedding, tuple(layers), output, max(costs.time_comm, default=0.0), fused_backward=fused)


def _sum(unit: UnitCosts, costs: Mapping[str, float]) -> UnitCosts:
    """Return `unit` with `costs`, given by the names of their fields, added."""
    return replace(unit, **{name: getattr(unit, name) + cost for name, cost in costs.items()})


def _layer_input_bytes(profile: Profile) -> float:
    model = SimpleNamespace(**profile.model)
    elements = model.seq_length * model.micro_batch_size * model.hidden_size / model.context_parallel_size
    divided = model.tensor_model_parallel_size if model.sequence_parallel else 1
    return elements * element_bytes(model) / divided


class _Fit(NamedTuple):
    """A system of equations: the costs of stages as sums of the costs of embedding, layers and output."""

    kinds: tuple[int, ...]
    """Index of each layer's kind; 0 for all layers if the stages' costs do not determine the costs of each kind."""
    embedding: np.ndarray
    """Number of embeddings in each stage; zeros if the embedding's costs are assumed to be zero."""
    layers: np.ndarray
    """Number of layers of each stage (rows) and kind (columns)."""
    output: np.ndarray

    @classmethod
    def of(cls, partition: Partition, kinds: Sequence[int]) -> _Fit:
        """Return the first system of equations from `_candidates` that has a unique solution."""
        for fit in cls._candidates(partition, kinds):
            columns = np.column_stack([*([fit.embedding] if fit.embedding.any() else []), fit.layers, fit.output])
            if np.linalg.matrix_rank(columns) == columns.shape[1]:
                return fit
        raise ScheduleError(f"a profile of {len(partition)} stages does not determine the costs of its layers")

    @classmethod
    def _candidates(cls, partition: Partition, kinds: Sequence[int]) -> Iterator[_Fit]:
        stages = len(partition)
        first, last = np.eye(stages)[0], np.eye(stages)[-1]
        of_stage = np.repeat(range(stages), partition)
        for told_apart in (tuple(kinds), (0,) * len(kinds)):
            layers = np.zeros((stages, max(told_apart) + 1))
            np.add.at(layers, (of_stage, np.array(told_apart)), 1)
            yield cls(told_apart, first, layers, last)
            yield cls(told_apart, 0 * first, layers, last)

    def solve(self, costs: Sequence[float] | np.ndarray) -> list[float]:
        """Return the costs of embedding, each layer and output that fit the stages' `costs` by least squares."""
        embedding, *of_kinds, output = nonnegative_least_squares(
            np.column_stack([self.embedding, self.layers, self.output]), np.asarray(costs, dtype=float)
        ).tolist()
        return [embedding, *(of_kinds[kind] for kind in self.kinds), output]

    def solve_layers(self, costs: Sequence[float]) -> list[float]:
        """Return the cost of each layer from the stages' `costs`, which do not include the embedding and the output."""
        of_kinds = nonnegative_least_squares(self.layers, np.asarray(costs, dtype=float)).tolist()
        return [of_kinds[kind] for kind in self.kinds]
