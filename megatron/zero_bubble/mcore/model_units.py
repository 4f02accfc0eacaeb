"""Describes the units of a model, which are measured separately, and provides data for the measurement.

The units of a model are the embedding, each layer, and all modules after the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config

from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore


class Unit(NamedTuple):
    """A part of a model that is built as a separate stage."""

    layer: int | None = None
    """Index of the unit's layer in a model that has one layer of each kind; None if the unit contains no layer."""
    embeds: bool = False
    is_last: bool = False
    """Whether all parts after the layers are included: multi-token prediction, final norm, output layer and loss."""


@dataclass(frozen=True)
class UnitModels:
    """Builds the units of a model, and provides the microbatches for the units' forwards.

    Attributes:
        build: function that makes a unit of the model for a pipeline of one rank. The unit puts its W into the
            `WeightGradStore` that is passed to `build`, and is wrapped in megatron-core's DDP.
        forward_step: the forward step of the training, with megatron-core's signature.
        data: an endless iterator over microbatches for `forward_step`.
        message: shape, type and device of the tensor that passes between stages.
        state_bytes: function that returns the bytes of model states, given the number of dense parameters and the
            number of expert parameters.
    """

    build: Callable[[Unit, WeightGradStore], torch.nn.Module]
    forward_step: Callable[..., Any]
    data: Iterator[Any]
    message: TensorSpec
    state_bytes: Callable[[int, int], float]

    def step_arguments(self, chunks: list[torch.nn.Module], num_microbatches: int) -> dict[str, Any]:
        """Return the arguments of the forward-backward function for a step whose stages are units of the model."""
        config = get_model_config(chunks[0])
        parts = parallel_state.get_context_parallel_world_size()
        if config.sequence_parallel:
            parts *= config.tensor_model_parallel_size
        return {
            "forward_step_func": self.forward_step,
            "data_iterator": [self.data] * len(chunks),
            "model": chunks,
            "num_microbatches": num_microbatches,
            "seq_length": self.message.shape[0] * parts,
            "micro_batch_size": self.message.shape[1],
        }


def keep_unit(model: Any, unit: Unit) -> None:
    """Drop all layers of a `GPTModel` except the layer of `unit`."""
    layers = model.decoder.layers
    model.decoder.layers = torch.nn.ModuleList([] if unit.layer is None else [layers[unit.layer]])


def random_microbatch(
    vocabulary: int, micro_batch_size: int, seq_length: int, *, has_mask: bool
) -> dict[str, torch.Tensor]:
    """Return a microbatch of random tokens on the host, with a data loader's fields; all calls return the same tokens.

    Args:
        has_mask: whether the microbatch has an attention mask.
    """
    sizes = (micro_batch_size, seq_length)
    tokens = torch.randint(vocabulary, sizes, generator=torch.Generator().manual_seed(0), device="cpu")
    microbatch = {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": torch.ones(sizes, device="cpu"),
        "position_ids": torch.arange(seq_length, device="cpu").repeat(micro_batch_size, 1),
    }
    if has_mask:
        square = torch.ones(micro_batch_size, 1, seq_length, seq_length, dtype=torch.bool, device="cpu")
        microbatch["attention_mask"] = square.triu(1)
    return microbatch


def release(chunks: Sequence[torch.nn.Module]) -> None:
    """Let the garbage collector free models that are no longer used, and the process groups that the models hold.

    The hooks of megatron-core's DDP refer to the model and its configuration. Autograd graphs refer to the hooks by
    references that Python's garbage collector does not see. The model's configuration refers to the optimizer, whose
    shards are views of the parameters. Some modules, such as the dispatcher of experts, keep a tensor and the autograd
    graph of the last forward.

    Args:
        chunks: this rank's chunks of the model, with their wrappers.
    """
    for chunk in chunks:
        get_model_config(chunk).grad_scale_func = None
        if isinstance(chunk, DistributedDataParallel):
            chunk.module = None
