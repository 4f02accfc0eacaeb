"""Refuses flags that do not work with parameters sharded by torch's FSDP2."""

from __future__ import annotations

from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.trainer.arguments import Arguments

_FSDP = "--use-torch-fsdp2"


def check_fully_sharded(args: Arguments) -> None:
    """Check the flags that go with `--use-torch-fsdp2`.

    Raises:
        ValueError: the first flag that does not.
    """
    if not args.use_torch_fsdp2:
        for name in ("torch_fsdp2_no_reshard_after_forward", "zero_bubble_reduce_every_microbatch"):
            if getattr(args, name):
                raise ValueError(f"{flag_name(name)} needs {_FSDP}")
        return
    reasons = {
        "--use-distributed-optimizer": (args.use_distributed_optimizer, "it shards the optimizer too: leave it out"),
        "--fp16": (args.fp16, "its loss scale is not shared by the shards: use --bf16"),
        "--num-experts": (args.num_experts is not None, "experts are not sharded: use --use-distributed-optimizer"),
        "--mtp-num-layers": (args.mtp_num_layers is not None, "its layers use a weight twice: leave it out"),
        "--transformer-impl transformer_engine": (
            args.transformer_impl == "transformer_engine",
            "its layers keep the weights for W: use --transformer-impl local",
        ),
        "--hierarchical-sgd": (args.hierarchical_sgd is not None, "replicas would step on shards of a shared gradient"),
        "--fp8-param-gather": (args.fp8_param_gather, "FSDP gathers what the model computes with: leave it out"),
        "--zero-bubble-post-validation": (
            args.zero_bubble_post_validation,
            "a step cannot be undone in a shard: use --use-distributed-optimizer",
        ),
        "--zero-bubble-vocabulary-parallel": (
            args.zero_bubble_vocabulary_parallel not in (None, "off"),
            "the vocabulary would be cut twice: leave it out",
        ),
        "--recompute-granularity full": (
            args.recompute_granularity == "full",
            "R would use parameters that are not gathered: use --recompute-granularity selective",
        ),
        f"--zero-bubble-recompute {args.zero_bubble_recompute}": (
            args.zero_bubble_recompute is not None,
            "R would use parameters that are not gathered: leave it out, or use --recompute-granularity selective",
        ),
    }
    for flag, (is_given, reason) in reasons.items():
        if is_given:
            raise ValueError(f"{flag} does not work with {_FSDP}: {reason}")
    if not args.untie_embeddings_and_output_weights:
        raise ValueError(f"{_FSDP} needs --untie-embeddings-and-output-weights: FSDP cannot share a weight")
