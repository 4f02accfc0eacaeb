"""Cuts a model's embedding and output layer into vocabulary shards of equal size, one shard for each rank.

Call `shard_vocabulary` after megatron-core has built the model chunks, and before `split_weight_gradients` and DDP. In
a model with a sharded vocabulary, all ranks of the pipeline compute embedding and output layer together, as operations
of the schedule (see `vocabulary_stage.py`). The first stage begins with the sum of the ranks' embeddings, and the last
stage ends with the hidden states.

There are p * t shards for p pipeline ranks and t tensor ranks; each rank has shard `tensor rank * p + pipeline rank`.
The rows of the vocabulary that megatron-core would give to one tensor rank are thus divided among the p pipeline ranks
that have this tensor rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config, unwrap_model
from torch.nn.utils.parametrize import is_parametrized

from megatron.zero_bubble.mcore.decoder_models import DECODER_MODELS, require_decoder_models
from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.mcore.refusals import refuse_with_features
from megatron.zero_bubble.mcore.refused_settings import Feature
from megatron.zero_bubble.mcore.vocabulary_shard import Rows, ShardWeight
from megatron.zero_bubble.mcore.vocabulary_size import check_vocabulary_size
from megatron.zero_bubble.mcore.weight_grad import has_hooks
from megatron.zero_bubble.runtime.joint import attempt, from_all_ranks, raise_first
from megatron.zero_bubble.schedule import Placement

_NAME = "vocabulary_shard"
"""Name of the vocabulary shard among the modules of a rank's first chunk."""
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""megatron-core's names for the embedding's weight and the output layer's weight, in models and in checkpoints."""


class VocabularyShard(torch.nn.Module):
    """This rank's rows of the embedding and of the output layer; tied weights are one parameter.

    Args:
        embedding: the rows of the embedding.
        output: the rows of the output layer; the same object as `embedding` if the weights are tied.
        index: index of this shard among all shards of the vocabulary, counted from 0.
        count: number of shards.
    """

    def __init__(self, embedding: ShardWeight, output: ShardWeight, index: int, count: int) -> None:
        super().__init__()
        self.embedding = embedding
        if output is embedding:
            # `output` is not a second submodule, so that `state_dict()` contains tied weights once.
            object.__setattr__(self, "output", embedding)
        else:
            self.output = output
        self.index, self.count = index, count

    @property
    def weights(self) -> list[ShardWeight]:
        return [self.embedding] if self.embedding is self.output else [self.embedding, self.output]

    def forget_gradients(self) -> None:
        """Drop the weights' separate sums of embedding gradients, and leave `main_grad` unchanged."""
        for weight in self.weights:
            weight.forget_gradient()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the shard's rows of the embedding and of the output layer, for a checkpoint.

        In the checkpoint, the rows are parts of the same tensors that megatron-core's own embedding and output layer
        save and load.
        """
        assert not sharded_offsets, "the shard is outside of the layers"
        group = (metadata or {}).get("dp_cp_group") or parallel_state.get_data_parallel_group(
            with_context_parallel=True
        )
        model = prefix.removesuffix(f"{_NAME}.")
        return {
            f"{prefix}{name}.weight": ShardedTensor.from_rank_offsets(
                f"{model}{key}",
                weight.weight,
                (0, self.index, self.count),
                replica_id=(0, 0, group.rank()),
                # On a different number of ranks, the vocabulary may be padded to a different size.
                allow_shape_mismatch=True,
            )
            for (name, key), weight in zip((("embedding", _EMBEDDING), ("output", _OUTPUT)), self.weights, strict=False)
        }


class SummedEmbedding(torch.nn.Module):
    """Replaces a `VocabParallelEmbedding`; returns the embeddings that E has looked up, summed over the tensor ranks.

    Attributes:
        looked_up: [batch, sequence, hidden], the embeddings of the next microbatch's tokens, with zeros for tokens that
            are not in this tensor rank's part of the vocabulary.
    """

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.reduce_scatter_embeddings = replaced.reduce_scatter_embeddings
        self.tp_group = replaced.tp_group
        self.looked_up: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.looked_up is None:
            raise ForwardStepError("the forward step calls model.embedding: give --zero-bubble-vocabulary-parallel off")
        looked_up, self.looked_up = self.looked_up, None
        if self.reduce_scatter_embeddings:
            looked_up = looked_up.transpose(0, 1).contiguous()
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(looked_up, group=self.tp_group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(looked_up, group=self.tp_group)


class HiddenOutput(torch.nn.Module):
    """Replaces an output layer and the loss after it; keeps the hidden states and the labels, and computes nothing.

    Attributes:
        loss_inputs: the inputs of the loss in the last forward; None if the last forward had no labels. The inputs of
            the loss are the hidden states, [sequence, batch, hidden], and the labels, [batch, sequence]. With sequence
            parallelism, the hidden states are this rank's part of the sequence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss_inputs: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden, None

    def keep(self, labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Keep the inputs of the loss; replaces the model's `compute_language_model_loss(labels, logits)`."""
        self.loss_inputs = hidden, labels
        return hidden


class HiddenOutputWithState(HiddenOutput):
    """A `HiddenOutput` that saves an empty extra state, as output layers do in checkpoints of hybrid models."""

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: None) -> None:
        """Do nothing: the extra state is empty."""


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Names of a module's attributes that contain hooks."""
Replacement = TypeVar("Replacement", SummedEmbedding, HiddenOutput)


class _Weight(NamedTuple):
    """Shape, type and attributes of a weight; the rank that has the weight sends this description to all ranks."""

    shape: tuple[int, int]
    dtype: torch.dtype
    attributes: dict[str, Any]


def shard_vocabulary(chunks: Sequence[torch.nn.Module], placement: Placement | None = None) -> VocabularyShard:
    """Spread the rows of embedding and output layer over the pipeline; a collective call of the pipeline's ranks.

    The rows keep the values that megatron-core has initialized or the caller has loaded. Call `shard_vocabulary` when
    the chunks are on their device, before `split_weight_gradients` and DDP; the chunks may already be wrapped in
    `Float16Module`. A second call of `shard_vocabulary` returns the same shard.

    Args:
        chunks: all model chunks of this rank.
        placement: the placement of the stages. The default is megatron-core's placement: interleaved if a rank has
            several chunks, otherwise linear.

    Raises:
        ValueError: the model cannot be sharded; raised on all ranks of the pipeline.
    """
    if (existing := vocabulary_shard_of(chunks)) is not None:
        return existing
    group = parallel_state.get_pipeline_model_parallel_group()
    placement = placement or Placement("linear" if len(chunks) == 1 else "interleaved", group.size(), len(chunks))
    models: list[Any] = [unwrap_model(chunk) for chunk in chunks]
    first, last = _model_of_stage(models, placement, 0), _model_of_stage(models, placement, placement.num_stages - 1)
    _, refusal = attempt(lambda: _refuse_vocabulary(models, placement, first, last))
    raise_first(from_all_ranks(refusal, group), refusal)
    own = {} if first is None else {_EMBEDDING: first.embedding.word_embeddings.weight}
    if last is not None and not last.share_embeddings_and_output_weights:
        own[_OUTPUT] = last.output_layer.weight
    weights = from_all_ranks({name: _describe(weight) for name, weight in own.items()}, group)
    tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
    index = parallel_state.get_tensor_model_parallel_rank() * group.size() + group.rank()
    device = next(models[0].parameters()).device
    num_uses = 1 if any(_OUTPUT in described for described in weights) else 2
    parts: dict[str, ShardWeight] = {}
    for rank, described in enumerate(weights):
        for name, weight in described.items():
            values = _scatter(own.get(name), weight, rank, group, device)
            parts[name] = ShardWeight(values, Rows(index * len(values), len(values)), weight.attributes, num_uses)
    embedding = parts[_EMBEDDING]
    shard = VocabularyShard(embedding, parts.get(_OUTPUT, embedding), index, group.size() * tensor_ranks)
    _replace_layers(models, first, last)
    models[0].add_module(_NAME, shard)
    return shard


def vocabulary_shard_of(chunks: Sequence[torch.nn.Module]) -> VocabularyShard | None:
    """Return this rank's shard, or None if the model's vocabulary is not sharded; the chunks may be wrapped."""
    return getattr(unwrap_model(chunks[0]), _NAME, None)


def replacement(kind: type[Replacement], chunks: Sequence[torch.nn.Module]) -> Replacement | None:
    """Return this rank's replacement module of the class `kind`, or None if this rank has no such module."""
    return next((module for chunk in chunks for module in chunk.modules() if isinstance(module, kind)), None)


def _model_of_stage(models: Sequence[Any], placement: Placement, stage: int) -> Any:
    """Return the model of a stage, or None if the stage is on another rank."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return models[placement.chunk_of(stage)] if placement.rank_of(stage) == rank else None


def _refuse_vocabulary(models: Sequence[Any], placement: Placement, first: Any, last: Any) -> None:
    """Raise `ValueError` if the vocabulary of the models cannot be sharded."""
    flag = "--zero-bubble-vocabulary-parallel"
    config = get_model_config(models[0])
    require_decoder_models(models, flag)
    if placement.num_ranks < 2:
        raise ValueError(f"{flag} needs at least two pipeline ranks: set --pipeline-model-parallel-size")
    refuse_with_features(config, [Feature.VOCABULARY_SHARDS])
    if (reason := why_not_replaced(first, last)) is not None:
        raise ValueError(f"{flag} replaces embedding, output layer and loss, but {reason}: give {flag} off")
    if first is not None:
        tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
        check_vocabulary_size(first.embedding.word_embeddings.num_embeddings, placement.num_ranks, tensor_ranks)


def why_not_replaced(first: Any, last: Any) -> str | None:
    """The reason why shards cannot take the place of a model's own embedding, output layer and loss.

    Args:
        first: the model whose embedding shards would replace; None without such a model on this rank.
        last: the model whose output layer and loss shards would replace; None without such a model on this rank.

    Returns:
        The reason as a clause; None if shards compute the same as the models.
    """
    layers = [] if first is None else [(first.embedding.word_embeddings, tensor_parallel.VocabParallelEmbedding)]
    layers += [] if last is None else [(last.output_layer, tensor_parallel.ColumnParallelLinear)]
    for layer, kind in layers:
        usual, name = kind.__name__, type(layer).__name__
        if not isinstance(layer, kind):
            return f"the model has a {name} in place of a {usual}"
        if type(layer).forward is not kind.forward or "forward" in vars(layer):
            return f"the model's {usual} ({name}) has a forward of its own"
        if any(getattr(layer, hooks) for hooks in _HOOKS) or any(map(has_hooks, layer.parameters())):
            return f"the model's {usual} has hooks"
        if getattr(layer, "bias", None) is not None or is_parametrized(layer):
            return f"the model's {usual} has a bias or a parametrized weight"
        if not all(weight.requires_grad for weight in layer.parameters()):
            return f"the model's {usual} is frozen"
    for name in _BEHIND_LAYERS:
        usual = getattr(GPTModel, name, None)
        if last is not None and usual is not None and not _has_method_of(last, name, DECODER_MODELS):
            return f"the model ({type(last).__name__}) has a {name} of its own"
    return None


_BEHIND_LAYERS = ("compute_language_model_loss", "_scale_logits", "_postprocess")
"""Methods of megatron-core's models, in some versions, that compute with the layers' output or with the logits."""


def _has_method_of(model: Any, name: str, kinds: Sequence[type]) -> bool:
    own = getattr(type(model), name, None)
    return name not in vars(model) and own in (None, *(getattr(kind, name, None) for kind in kinds))


def _describe(weight: torch.Tensor) -> _Weight:
    """Describe a weight and its attributes from megatron-core, except the attributes that mark the weight as tied."""
    attributes: Mapping[str, Any] = vars(weight)
    plain = {
        name: value
        for name, value in attributes.items()
        if isinstance(value, (bool, int, float, str)) and name not in ("shared", "shared_embedding")
    }
    rows, hidden = weight.shape
    return _Weight((rows, hidden), weight.dtype, plain)


def _scatter(
    whole: torch.Tensor | None, weight: _Weight, source: int, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Scatter the rows of a weight from the pipeline rank `source`, which has all rows; return this rank's rows."""
    rows, hidden = weight.shape
    part = torch.empty(rows // group.size(), hidden, dtype=weight.dtype, device=device)
    # The rows are sent as bytes, because gloo does not support every type.
    parts = (
        None if whole is None else [own.contiguous().view(torch.uint8) for own in whole.detach().chunk(group.size())]
    )
    dist.scatter(part.view(torch.uint8), parts, src=dist.get_global_rank(group, source), group=group)
    return part


def _replace_layers(models: Sequence[Any], first: Any, last: Any) -> None:
    """Replace embedding and output layer of the models, and mark the models as having no tied weights."""
    for model in models:
        # With tied weights megatron-core would all-reduce the gradients of the first and the last stage.
        model.share_embeddings_and_output_weights = False
    if first is not None:
        first.embedding.word_embeddings = SummedEmbedding(first.embedding.word_embeddings)
    if last is not None:
        # `GPTModel` leaves the output layer's extra state out of checkpoints.
        last.output_layer = HiddenOutput() if isinstance(last, GPTModel) else HiddenOutputWithState()
        last.compute_language_model_loss = last.output_layer.keep
        # The model's own `sharded_state_dict` needs an output layer with a weight.
        last.sharded_state_dict = MethodType(MegatronModule.sharded_state_dict, last)
