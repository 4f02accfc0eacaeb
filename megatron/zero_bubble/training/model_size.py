"""Computes the parameters, operations and activations of a GPT's layers from Megatron's flags.

All sizes are of one tensor-parallel rank and, if they depend on tokens, of one microbatch. s is the sequence length,
b the microbatch size, h the hidden size, a the number of attention heads, V the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.zero_bubble.job.model_states import Parameters, element_bytes
from megatron.zero_bubble.training.arguments import Arguments


class Linear(NamedTuple):
    """Sizes of one linear layer of a transformer layer before it is split over tensor-parallel ranks."""

    inputs: int
    outputs: int
    splits_inputs: bool
    """Whether the layer is row-parallel: ranks split its inputs, and each has the whole bias."""


@dataclass(frozen=True)
class StageLayers:
    """The part of the model that one pipeline stage holds."""

    num_layers: int
    is_first: bool
    is_last: bool


def attention_linears(args: Arguments) -> tuple[Linear, Linear]:
    """The linear layers of attention: queries, keys and values in one, and the output projection."""
    query, key_value = _widths(args)
    return Linear(args.hidden_size, query + 2 * key_value, False), Linear(query, args.hidden_size, True)


def mlp_linears(args: Arguments) -> tuple[Linear, Linear]:
    """The linear layers of a dense MLP or of one expert; the first layer of a gated MLP also computes the gate."""
    assert args.ffn_hidden_size is not None
    gates = 2 if args.swiglu else 1
    return (
        Linear(args.hidden_size, gates * args.ffn_hidden_size, False),
        Linear(args.ffn_hidden_size, args.hidden_size, True),
    )


def _widths(args: Arguments) -> tuple[int, int]:
    """The widths of the queries, and of the keys or values, of all heads together."""
    assert args.kv_channels is not None
    return args.kv_channels * args.num_attention_heads, args.kv_channels * args.num_query_groups


def stage_parameters(args: Arguments, stage: StageLayers) -> Parameters:
    """Parameters of a stage. A tied output layer has its own copy of the embedding unless both are in the stage."""
    norm = args.hidden_size * (1 if args.normalization == "RMSNorm" else 2)
    dense, expert = stage.num_layers * (2 * norm + _sum_of(args, attention_linears(args))), 0
    if args.num_experts is None:
        dense += stage.num_layers * _sum_of(args, mlp_linears(args))
    else:
        dense += stage.num_layers * args.hidden_size * args.num_experts
        expert = stage.num_layers * _sum_of(args, mlp_linears(args)) * args.num_experts
        expert //= args.expert_model_parallel_size
    table = args.padded_vocab_size // args.tensor_model_parallel_size * args.hidden_size
    if stage.is_first:
        assert args.max_position_embeddings is not None
        learned = args.position_embedding_type == "learned_absolute"
        dense += table + (args.max_position_embeddings * args.hidden_size if learned else 0)
    if stage.is_last:
        shares = not args.untie_embeddings_and_output_weights and stage.is_first
        dense += norm + (0 if shares else table)
    return Parameters(dense, expert)


def _sum_of(args: Arguments, linears: tuple[Linear, ...]) -> int:
    t = args.tensor_model_parallel_size
    total = 0
    for linear in linears:
        total += linear.inputs * linear.outputs // t
        if not args.disable_bias_linear:
            total += linear.outputs if linear.splits_inputs else linear.outputs // t
    return total


class Flops(NamedTuple):
    """Floating-point operations of one microbatch on a stage; a multiply and an add are two."""

    f: float
    b: float
    """With what selective recomputation computes again."""
    w: float
    r: float = 0.0
    """What full recomputation computes again."""

    @property
    def total(self) -> float:
        return sum(self)


def stage_flops(args: Arguments, stage: StageLayers) -> Flops:
    """Floating-point operations of a stage: F = sbh (24h + 4s), B = sbh (24h + 8s), W = sbh 24h for a plain layer.

    The formulas are from Qi et al. 2024; the logits are added. Local attention computes the whole matrix of scores,
    whatever the mask; under context parallelism, the scores of a rank's own queries.
    """
    tokens = rank_tokens(args)
    linear = 2.0 * tokens * sum(one.inputs * one.outputs for one in _computed_linears(args))
    core = 4.0 * tokens * args.seq_length * _widths(args)[0]
    logits = 2.0 * tokens * args.hidden_size * args.padded_vocab_size if stage.is_last else 0.0
    again = core if args.recompute_granularity == "selective" else 0.0
    layers, t = stage.num_layers, args.tensor_model_parallel_size
    return Flops(
        f=(layers * (linear + core) + logits) / t,
        b=(layers * (linear + 2 * core + again) + logits) / t,
        w=(layers * linear + logits) / t,
        r=_recomputed_layers(args, stage) * (linear + core) / t,
    )


def _computed_linears(args: Arguments) -> Iterator[Linear]:
    """The linear layers that a token passes in one transformer layer, without routers, as Megatron-LM counts."""
    yield from attention_linears(args)
    for _ in range(1 if args.num_experts is None else args.moe_router_topk):
        yield from mlp_linears(args)


def _recomputed_layers(args: Arguments, stage: StageLayers) -> int:
    """The number of the stage's layers that R computes again, where a microbatch has one."""
    if args.zero_bubble_recompute is not None:
        return stage.num_layers
    if args.recompute_granularity != "full":
        return 0
    if args.recompute_method == "block":
        return min(stage.num_layers, args.recompute_num_layers or 0)
    return stage.num_layers


class Activations(NamedTuple):
    """Bytes of one microbatch on a stage."""

    after_f: float
    """Bytes held from F to B where nothing is recomputed in full."""
    after_b: float
    """Bytes held from B to W: the inputs of the linear layers and the gradients of their outputs."""
    restored: float = 0.0
    """Bytes of `after_f` that F drops and R restores, with full recomputation."""


def stage_activations(args: Arguments, stage: StageLayers) -> Activations:
    """Activation bytes of a stage: M_B = sb (34h + 5as) and M_W = 32 sbh for a plain layer, and logits.

    The formulas (Korthikanti et al. 2022 for M_B, Qi et al. 2024 for M_W) hold in half precision with dropout. For
    other layers every tensor that they keep is counted.
    """
    size, tokens = element_bytes(args), rank_tokens(args)
    held, held_for_w = _layer_activations(args)
    recomputed = _recomputed_layers(args, stage)
    # Uniform recomputation keeps the input of every unit of layers.
    units = recomputed / (args.recompute_num_layers or 1) if args.recompute_method == "uniform" else recomputed
    restored = recomputed * held - units * size * tokens * args.hidden_size / _sequence_split(args)
    kept = stage.num_layers * held
    for_w = stage.num_layers * held_for_w
    if stage.is_first and args.hidden_dropout > 0:
        kept += tokens * args.hidden_size / _sequence_split(args)
    if stage.is_last:
        # Inputs of the norm and of the output layer; logits are kept in fp32 for the loss.
        hidden = tokens * args.hidden_size / _sequence_split(args)
        logits = tokens * args.padded_vocab_size / args.tensor_model_parallel_size
        kept += 2 * size * hidden + 4 * logits
        for_w += size * (hidden + logits)
    return Activations(kept, for_w, restored)


def _layer_activations(args: Arguments) -> tuple[float, float]:
    """Bytes that one layer keeps from F to B, and from B to W."""
    size, tokens, t = element_bytes(args), rank_tokens(args), args.tensor_model_parallel_size
    query, key_value = _widths(args)
    hidden = size * tokens * args.hidden_size / _sequence_split(args)
    mask = tokens * args.hidden_size / _sequence_split(args) if args.hidden_dropout > 0 else 0.0
    experts = 1 if args.num_experts is None else args.moe_router_topk
    held = 4 * hidden + 2 * mask  # inputs of both norms, of attention and of the MLP; dropout's masks
    held += size * tokens * (query + 2 * key_value) / t  # queries, keys, values
    held += size * tokens * query / t  # input of the projection
    held += experts * _mlp_activations(args) / t
    if args.recompute_granularity != "selective":
        scores = tokens * args.seq_length * args.num_attention_heads / t
        # The softmax's output; with dropout also dropout's output and mask.
        held += scores * (size + (size + 1 if args.attention_dropout > 0 else 0))
    for_w = sum(size * tokens * _kept_for_w(args, one) for one in _computed_linears(args))
    return held, for_w


def _kept_for_w(args: Arguments, linear: Linear) -> float:
    """Elements that a rank keeps for W, for each token: the layer's input and the gradient of its output."""
    t = args.tensor_model_parallel_size
    if linear.splits_inputs:
        return linear.inputs / t + linear.outputs
    return linear.inputs / _sequence_split(args) + linear.outputs / t


def _mlp_activations(args: Arguments) -> float:
    """Bytes kept between an MLP's linear layers: inputs of the activation function and of the second layer.

    A gated MLP also keeps the gate and the output of the activation function.
    """
    assert args.ffn_hidden_size is not None
    tensors = 4 if args.swiglu else 2
    return float(element_bytes(args) * rank_tokens(args) * args.ffn_hidden_size * tensors)


def _sequence_split(args: Arguments) -> int:
    """Number of ranks that split the activations between linear layers."""
    return args.tensor_model_parallel_size if args.sequence_parallel else 1


def rank_tokens(args: Arguments) -> int:
    """Tokens of a microbatch on one context-parallel rank."""
    return args.micro_batch_size * args.seq_length // args.context_parallel_size
