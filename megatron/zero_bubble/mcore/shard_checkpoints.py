"""Lets megatron-core save and load parameters and optimizer state that are sharded over replicas.

If torch's FSDP2 shards a model, megatron-core saves each replica's rows of a parameter as a part of the whole
parameter, under the name that the parameter has without sharding. A job with any number of replicas, with or without
sharding, can load the checkpoint of a sharded model. This module corrects three steps of saving and loading with FSDP2:
the matching of the optimizer's state to the parameters, the positions of the rows of gated layers, and the conversion
of loaded tensors to shards. With the distributed optimizer, this module corrects the positions of parameters in the
gathered optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import optimizer as matching
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.tensor import DTensor

from megatron.zero_bubble.mcore.replaced import replaced

FP32_COPIES = "fp32_from_fp16_params"
"""megatron-core's name for the fp32 copies of the parameters in the state of an optimizer."""


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model: dict[str, Any], metadata: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    """Return the optimizer's `sharded_state_dict`, with the parameters' fp32 copies in a dictionary and not in a list.

    The keys of the dictionary are the indices of the parameter groups. megatron-core's own `sharded_state_dict` has the
    fp32 copies in a list of parameter groups. In a list, a group without parameters on this rank, such as the group of
    biases in a stage without layers, would change the positions of the other groups.
    """
    # megatron-core matches parameters by the ids of local tensors, but `to_local` creates a new tensor in each call.
    with replaced(matching, "to_local_if_dtensor", _local_tensor), _places_in_gathered_state(optimizer):
        state: dict[str, Any] = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    for part in (state, *state.values()):
        if isinstance(part, dict) and FP32_COPIES in part:
            part[FP32_COPIES] = {group: copies for group, copies in enumerate(part[FP32_COPIES]) if copies}
    return state


@contextmanager
def _places_in_gathered_state(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Give megatron-core the positions of parameters in the distributed optimizer's gathered state.

    megatron-core gathers the state of a buffer without the padding after each bucket. But up to version 0.19,
    megatron-core reads a parameter's state at the parameter's offset in the padded buffer. Later versions subtract the
    padding of the buckets before the parameter's bucket; this function gives every parameter bucket 0, so that later
    versions subtract nothing.
    """
    with ExitStack() as places:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            for buffer in getattr(part, "buffers", ()):  # only distributed optimizers have buffers
                paddings = (bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets)
                before = list(accumulate(paddings, initial=0))
                unpadded = {
                    parameter: (start - before[bucket], end - before[bucket], 0)
                    for parameter, (start, end, bucket) in buffer.param_index_map.items()
                }
                places.enter_context(replaced(buffer, "param_index_map", unpadded))
        yield


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_state(chunk: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the chunk's `sharded_state_dict`, with rows of gated layers at their positions in unsharded weights."""
    state: dict[str, Any] = chunk.sharded_state_dict(metadata=metadata)
    for name, parameter in chunk.named_parameters():
        part = state.get(name)
        if isinstance(parameter, DTensor) and isinstance(part, ShardedTensorFactory):
            state[name] = _gated(part, parameter)
    return state


def _gated(part: ShardedTensorFactory, parameter: DTensor) -> ShardedTensorFactory:
    """Return a copy of the factory `part` that saves a replica's rows at their positions in the gated weight or bias.

    megatron-core cuts each shard into rows of the gate and rows of the input projection, as if the shard were the whole
    tensor of a tensor-parallel rank.
    """
    build, mesh = part.build_fn, parameter.device_mesh
    ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    places, num_places = places_of_gated_rows(mesh.get_local_rank(), mesh.size(), *ranks)

    def build_pieces(key: str, tensor: torch.Tensor, *more: Any) -> list[ShardedTensor]:
        model: ShardedTensor = build(key, tensor, *more)[0]
        rows = model.prepend_axis_num
        pieces = []
        for place, piece in zip(places, tensor.chunk(len(places)), strict=True):
            offset, fragments = list(model.global_offset), list(model.axis_fragmentations or ())
            offset[rows], fragments[rows] = place * len(piece), num_places
            pieces.append(
                replace(
                    model,
                    data=piece,
                    local_shape=tuple(piece.shape),
                    global_offset=tuple(offset),
                    axis_fragmentations=tuple(fragments),
                )
            )
        return pieces

    return replace(part, build_fn=build_pieces)


def places_of_gated_rows(replica: int, num_replicas: int, rank: int, num_ranks: int) -> tuple[list[int], int]:
    """Return the positions of one replica's rows in the unsharded weight of a gated layer.

    The unsharded weight of a gated layer contains all rows of the gate, followed by all rows of the input projection. A
    tensor-parallel rank has its part of the gate's rows, followed by its part of the input projection's rows. FSDP2
    divides the rows of a tensor-parallel rank among this rank's replicas.

    Returns:
        The indices of the pieces that the replica holds, and the total number of pieces. The pieces divide the
        unsharded weight into ranges of consecutive rows, all of the same length. Piece 0 has the weight's first rows.
    """
    # With an odd number of replicas, the middle replica has rows of the gate and of the input.
    num_pieces = 1 if num_replicas % 2 == 0 else 2
    in_half = num_replicas * num_pieces // 2
    halves = [divmod(replica * num_pieces + piece, in_half) for piece in range(num_pieces)]
    return [(half * num_ranks + rank) * in_half + place for half, place in halves], 2 * num_ranks * in_half


def shards_of(chunk: torch.nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loaded `tensors` of the chunk; convert the tensors of sharded parameters to DTensors."""
    parameters = dict(chunk.named_parameters())
    return {name: shard_like(parameters.get(name), tensor) for name, tensor in tensors.items()}


def optimizer_shards(part: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the loaded `state` of the optimizer `part`; convert the states of sharded parameters to DTensors.

    Args:
        part: a megatron-core optimizer that is not a distributed optimizer, in fp32 or with fp32 copies of the
            parameters.
    """
    parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    # With fp32 copies, torch's state is the entry `optimizer` of `state`. The entry with the number of steps has no
    # integer key. On a rank without parameters there may be no states.
    states = state.get("optimizer", state).setdefault("state", {})
    for index, values in states.items():
        if isinstance(index, int):
            values.update({name: shard_like(parameters[index], value) for name, value in values.items()})
    if hasattr(part, "fp32_from_float16_groups"):
        loaded = state.get(FP32_COPIES, {})
        state[FP32_COPIES] = [
            [shard_like(copy, value) for copy, value in zip(copies, loaded.get(group, ()), strict=True)]
            for group, copies in enumerate(part.fp32_from_float16_groups)
        ]
    return state


def shard_like(parameter: Any, value: Any) -> Any:
    """Return the loaded local tensor `value`, converted to a DTensor if `parameter` is sharded."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
