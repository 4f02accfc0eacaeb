"""Computes the sizes of a GPT's linear layers and the parameters of its stages from Megatron's flags.

All sizes are of one tensor-parallel rank and, if they depend on tokens, of one microbatch. s is the sequence length,
b the microbatch size, h the hidden size, a the number of attention heads, V the padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.zero_bubble.job.model_states import Parameters
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
    has_vocabulary: bool = True
    """Whether the first and the last stage have embedding and output layer, which otherwise all ranks share."""


def attention_linears(args: Arguments) -> tuple[Linear, Linear]:
    """The linear layers of attention: queries, keys and values in one, and the output projection."""
    query, key_value = attention_widths(args)
    return Linear(args.hidden_size, query + 2 * key_value, False), Linear(query, args.hidden_size, True)


def mlp_linears(args: Arguments) -> tuple[Linear, Linear]:
    """The linear layers of a dense MLP or of one expert; the first layer of a gated MLP also computes the gate."""
    assert args.ffn_hidden_size is not None
    gates = 2 if args.swiglu else 1
    return (
        Linear(args.hidden_size, gates * args.ffn_hidden_size, False),
        Linear(args.ffn_hidden_size, args.hidden_size, True),
    )


def attention_widths(args: Arguments) -> tuple[int, int]:
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
    table = vocabulary_table(args) if stage.has_vocabulary else 0
    if stage.is_first:
        assert args.max_position_embeddings is not None
        learned = args.position_embedding_type == "learned_absolute"
        dense += table + (args.max_position_embeddings * args.hidden_size if learned else 0)
    if stage.is_last:
        shares = not args.untie_embeddings_and_output_weights and stage.is_first
        dense += norm + (0 if shares else table)
    return Parameters(dense, expert)


def vocabulary_table(args: Arguments) -> int:
    """Parameters of the embedding, or of the output layer."""
    return args.padded_vocab_size // args.tensor_model_parallel_size * args.hidden_size


def _sum_of(args: Arguments, linears: tuple[Linear, ...]) -> int:
    t = args.tensor_model_parallel_size
    total = 0
    for linear in linears:
        total += linear.inputs * linear.outputs // t
        if not args.disable_bias_linear:
            total += linear.outputs if linear.splits_inputs else linear.outputs // t
    return total


def rank_tokens(args: Arguments) -> int:
    """Tokens of a microbatch on one context-parallel rank."""
    return args.micro_batch_size * args.seq_length // args.context_parallel_size
