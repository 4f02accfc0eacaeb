"""What the layers of a GPT hold and compute, from Megatron's flags: parameters, operations, activations.

Everything is for one tensor-parallel rank and, where it depends on tokens, for one microbatch. s is the sequence
length, b the microbatch size, h the hidden size, a the number of attention heads, V the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.zero_bubble.training.arguments import Arguments


class Linear(NamedTuple):
    """One linear layer of a transformer layer, whole."""

    inputs: int
    outputs: int
    splits_inputs: bool
    """A row-parallel layer: its ranks share the inputs' side, and each has the whole bias."""


@dataclass(frozen=True)
class StageLayers:
    """What one pipeline stage holds."""

    num_layers: int
    is_first: bool
    is_last: bool


class Parameters(NamedTuple):
    """Of one rank; those of experts are shared by other ranks than the rest."""

    dense: int
    expert: int

    def __add__(self, other: Parameters) -> Parameters:  # type: ignore[override]
        return Parameters(self.dense + other.dense, self.expert + other.expert)


def attention_linears(args: Arguments) -> tuple[Linear, Linear]:
    """Queries, keys and values in one; the output projection."""
    query, key_value = _widths(args)
    return Linear(args.hidden_size, query + 2 * key_value, False), Linear(query, args.hidden_size, True)


def mlp_linears(args: Arguments) -> tuple[Linear, Linear]:
    """Of a dense MLP, or of one expert; a gated MLP computes the gate along with its first product."""
    assert args.ffn_hidden_size is not None
    gates = 2 if args.swiglu else 1
    return (
        Linear(args.hidden_size, gates * args.ffn_hidden_size, False),
        Linear(args.ffn_hidden_size, args.hidden_size, True),
    )


def _widths(args: Arguments) -> tuple[int, int]:
    """Of the queries, and of the keys (or values), of all heads together."""
    assert args.kv_channels is not None
    return args.kv_channels * args.num_attention_heads, args.kv_channels * args.num_query_groups


def stage_parameters(args: Arguments, stage: StageLayers) -> Parameters:
    """Parameters of a stage. A tied output layer has a copy of the embedding, unless both are in this stage."""
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
    """Operations of one microbatch on a stage, a multiply and an add counting two."""

    f: float
    b: float
    w: float

    @property
    def total(self) -> float:
        return self.f + self.b + self.w


def stage_flops(args: Arguments, stage: StageLayers) -> Flops:
    """F = sbh (24h + 4s), B = sbh (24h + 8s), W = sbh 24h of a plain layer (Qi et al. 2024), and logits.

    The local attention computes the whole matrix of scores, whatever the mask leaves of it; under context
    parallelism, those of its own queries.
    """
    tokens = rank_tokens(args)
    linear = 2.0 * tokens * sum(one.inputs * one.outputs for one in _computed_linears(args))
    core = 4.0 * tokens * args.seq_length * _widths(args)[0]
    logits = 2.0 * tokens * args.hidden_size * args.padded_vocab_size if stage.is_last else 0.0
    again = {"full": linear + core, "selective": core}.get(args.recompute_granularity or "", 0.0)
    layers, t = stage.num_layers, args.tensor_model_parallel_size
    return Flops(
        f=(layers * (linear + core) + logits) / t,
        b=(layers * (linear + 2 * core) + _recomputed_layers(args, stage) * again + logits) / t,
        w=(layers * linear + logits) / t,
    )


def _computed_linears(args: Arguments) -> Iterator[Linear]:
    """The linear layers that a token passes in one transformer layer. Routers are left out, as Megatron-LM does."""
    yield from attention_linears(args)
    for _ in range(1 if args.num_experts is None else args.moe_router_topk):
        yield from mlp_linears(args)


def _recomputed_layers(args: Arguments, stage: StageLayers) -> int:
    """How many of the stage's layers are recomputed at all."""
    if args.recompute_granularity == "full" and args.recompute_method == "block":
        return min(stage.num_layers, args.recompute_num_layers or 0)
    return stage.num_layers


class Activations(NamedTuple):
    """Bytes of one microbatch on a stage."""

    after_f: float
    """Held from F to B."""
    after_b: float
    """Held from B to W: the inputs of the linear layers and the gradients of their outputs."""


def stage_activations(args: Arguments, stage: StageLayers) -> Activations:
    """M_B = sb (34h + 5as) and M_W = 32 sbh bytes of a plain layer in half precision with dropout, and logits.

    Korthikanti et al. 2022 count the first, Qi et al. 2024 the second, for layers of the plain kind; here every
    tensor is counted that a layer of the flags' kind keeps.
    """
    size, tokens = element_bytes(args), rank_tokens(args)
    held, held_for_w = _layer_activations(args)
    recomputed = 0
    if args.recompute_granularity == "full":
        recomputed = _recomputed_layers(args, stage)
    # Uniform recomputation keeps the input of every unit of layers; its layers' other tensors live from B to W.
    units = recomputed / (args.recompute_num_layers or 1) if args.recompute_method == "uniform" else recomputed
    kept = (stage.num_layers - recomputed) * held + units * size * tokens * args.hidden_size / _sequence_split(args)
    for_w = stage.num_layers * held_for_w
    if stage.is_first and args.hidden_dropout > 0:
        kept += tokens * args.hidden_size / _sequence_split(args)
    if stage.is_last:
        # Inputs of the norm and of the output layer; logits are kept in fp32 for the loss.
        hidden = tokens * args.hidden_size / _sequence_split(args)
        logits = tokens * args.padded_vocab_size / args.tensor_model_parallel_size
        kept += 2 * size * hidden + 4 * logits
        for_w += size * (hidden + logits)
    return Activations(kept, for_w)


def _layer_activations(args: Arguments) -> tuple[float, float]:
    """Bytes that one layer keeps for B, and for W."""
    size, tokens, t = element_bytes(args), rank_tokens(args), args.tensor_model_parallel_size
    query, key_value = _widths(args)
    hidden = size * tokens * args.hidden_size / _sequence_split(args)
    mask = tokens * args.hidden_size / _sequence_split(args) if args.hidden_dropout > 0 else 0.0
    experts = 1 if args.num_experts is None else args.moe_router_topk
    held = 4 * hidden + 2 * mask  # inputs of both norms, of attention and of the MLP; what dropout kept
    held += size * tokens * (query + 2 * key_value) / t  # queries, keys, values
    held += size * tokens * query / t  # input of the projection
    held += experts * _mlp_activations(args) / t
    if args.recompute_granularity != "selective":
        scores = tokens * args.seq_length * args.num_attention_heads / t
        # The softmax; with dropout what it kept, and its mask.
        held += scores * (size + (size + 1 if args.attention_dropout > 0 else 0))
    for_w = sum(size * tokens * _kept_for_w(args, one) for one in _computed_linears(args))
    return held, for_w


def _kept_for_w(args: Arguments, linear: Linear) -> float:
    """Elements a token: the layer's input and the gradient of its output, as this rank has them."""
    t = args.tensor_model_parallel_size
    if linear.splits_inputs:
        return linear.inputs / t + linear.outputs
    return linear.inputs / _sequence_split(args) + linear.outputs / t


def _mlp_activations(args: Arguments) -> float:
    """Bytes of an MLP between its two linear layers: input of the activation function, input of the second layer.

    A gated MLP also keeps the gate and what the function made of it.
    """
    assert args.ffn_hidden_size is not None
    tensors = 4 if args.swiglu else 2
    return float(element_bytes(args) * rank_tokens(args) * args.ffn_hidden_size * tensors)


def _sequence_split(args: Arguments) -> int:
    """Ranks that share what lies between linear layers."""
    return args.tensor_model_parallel_size if args.sequence_parallel else 1


def rank_tokens(args: Arguments) -> int:
    """Tokens of a microbatch that a context-parallel rank has."""
    return args.micro_batch_size * args.seq_length // args.context_parallel_size


def element_bytes(args: Arguments) -> int:
    """Of an activation, and of a parameter that computes."""
    return 2 if args.bf16 or args.fp16 else 4
