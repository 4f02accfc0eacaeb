"""Counts the model's floating-point operations, for `--log-throughput`."""

from __future__ import annotations

from megatron.zero_bubble.job.hybrid_pattern import HybridPattern
from megatron.zero_bubble.training.arguments import Arguments


def flops_per_iteration(args: Arguments, batch_size: int) -> float:
    """Floating-point operations of one iteration of `batch_size` sequences, counted as Megatron-LM does.

    A multiply and an add of a matrix product are two operations, and each product counts three times: for F, B and W.
    Half of the attention's products are counted, as a causal mask leaves them. Recomputation is not counted.
    """
    assert args.kv_channels is not None
    assert args.ffn_hidden_size is not None
    query = args.kv_channels * args.num_attention_heads
    key_value = 2 * args.kv_channels * args.num_query_groups
    projections = args.hidden_size * (2 * query + key_value)
    attention = query * args.seq_length
    mlp = (3 if args.swiglu else 2) * args.hidden_size * args.ffn_hidden_size
    if args.num_experts is not None:
        mlp *= args.moe_router_topk
    logits = args.hidden_size * args.padded_vocab_size
    further = args.mtp_num_layers or 0
    joining = 2 * args.hidden_size**2
    """Products a token of the layer that joins a further token's embedding with the hidden state."""
    layers = (args.num_layers + further) * (projections + attention + mlp) + further * joining
    if args.hybrid_layer_pattern is not None:
        attentions = HybridPattern.parse(args.hybrid_layer_pattern).symbols.count("*")
        dense = HybridPattern.parse(args.hybrid_layer_pattern).symbols.count("-")
        layers = attentions * (projections + attention) + (args.num_layers - attentions - dense) * mlp
        layers += dense * (3 if args.swiglu else 2) * args.hidden_size * args.ffn_hidden_size
    per_token = layers + (1 + further) * logits
    return 3 * 2 * per_token * args.seq_length * batch_size
