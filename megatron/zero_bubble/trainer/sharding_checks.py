"""Refuses flags that do not work with parameters sharded by torch's FSDP2."""

from __future__ import annotations

from megatron.zero_bubble.session.flags import flags_text
from megatron.zero_bubble.trainer.arguments import Arguments

_FSDP = "--use-torch-fsdp2"
_GATHERED = "R would use parameters that are not gathered: use --recompute-granularity selective"
_REASONS = {
    ("use_distributed_optimizer", None): "FSDP already shards the optimizer: leave it out",
    ("fp16", None): "the shards would not share one loss scale: use --bf16",
    ("num_experts", None): "experts are not sharded: use --use-distributed-optimizer",
    ("mtp_num_layers", None): "layers of multi-token prediction use a weight twice: leave it out",
    ("hierarchical_sgd", None): "each replica would hold only a shard of the model",
    ("fp8_param_gather", None): "FSDP gathers parameters in the model's own precision: leave it out",
    ("zero_bubble_post_validation", None): "a step cannot be undone in a shard: use --use-distributed-optimizer",
    ("zero_bubble_recompute", None): _GATHERED,
    ("transformer_impl", "transformer_engine"): "W would use freed weights: use --transformer-impl local",
    ("zero_bubble_vocabulary_parallel", "on"): "the vocabulary would be cut twice: leave it out",
    ("zero_bubble_vocabulary_parallel", "auto"): "the vocabulary would be cut twice: leave it out",
    ("recompute_granularity", "full"): _GATHERED,
}
"""(flag, refused value) -> reason; None refuses every value."""


def check_fully_sharded(args: Arguments) -> None:
    """Refuse flags that do not work with `--use-torch-fsdp2`.

    Raises:
        ValueError: a flag is refused; the message names the first such flag.
    """
    if not args.use_torch_fsdp2:
        return
    for (name, refused), reason in _REASONS.items():
        value = getattr(args, name)
        if value and refused in (None, value):
            raise ValueError(f"{flags_text({name: value})} does not work with {_FSDP}: {reason}")
    if not args.untie_embeddings_and_output_weights:
        raise ValueError(f"{_FSDP} needs --untie-embeddings-and-output-weights: FSDP cannot share a weight")
