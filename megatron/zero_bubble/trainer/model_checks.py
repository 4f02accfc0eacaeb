"""Refuses flags of a model that contradict each other, or with which megatron-core cannot train."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from megatron.zero_bubble.session.flags import flag_name, flags_text
from megatron.zero_bubble.trainer.arguments import TORCH_BACKENDS, Arguments
from megatron.zero_bubble.trainer.defaults import require_multiple, unfused_attention

_OF_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "gdn_norm_out", "gdp_qkv", "mhc")
"""Modules that megatron-core recomputes only with Transformer Engine installed, even in local layers."""
_FSDP = "--use-torch-fsdp2"
_GATHERED = "R would use parameters that are not gathered: use --recompute-granularity selective"
_NOT_WITH_FSDP = {
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


def check_model(args: Arguments) -> None:
    """Raise `ValueError` if the flags of positions, attention and prediction layers contradict each other."""
    require_multiple(args, "num_attention_heads", "num_query_groups")
    if args.max_position_embeddings < args.seq_length:
        raise ValueError(
            f"--max-position-embeddings {args.max_position_embeddings} is below --seq-length {args.seq_length}"
        )
    uses_rope, rotated = args.position_embedding_type == "rope", int(args.kv_channels * args.rotary_percent)
    if uses_rope and rotated + rotated % 2 > args.kv_channels:
        raise ValueError(
            f"--position-embedding-type rope rotates pairs of channels, but a head has {args.kv_channels}: "
            f"choose another --kv-channels, or a --rotary-percent below {args.rotary_percent}"
        )
    folders = {name: folder for name in ("save", "load") if (folder := getattr(args, name)) is not None}
    if folders and args.mtp_num_layers and args.pipeline_model_parallel_size > 1 and not uses_rope:
        raise ValueError(
            f"{flags_text(folders)} with --mtp-num-layers {args.mtp_num_layers} needs --position-embedding-type rope: "
            "the first and the last stage learn separate positions, but a checkpoint holds only one of both"
        )
    if args.mtp_num_layers and args.no_rope_freq:
        raise ValueError(
            f"{flags_text({'no_rope_freq': args.no_rope_freq})} with --mtp-num-layers {args.mtp_num_layers}: "
            "megatron-core's list of layers without positions has no entry for prediction layers: give one of them"
        )
    unfused = unfused_attention(args) if args.transformer_impl == "local" else []
    if unfused and args.attention_backend in TORCH_BACKENDS:
        raise ValueError(
            f"--attention-backend {args.attention_backend}: torch's fused attention does not compute "
            f"{flag_name(unfused[0])}: give --attention-backend local"
        )
    if "window_size" in unfused and args.context_parallel_size > 1:
        raise ValueError(
            f"--context-parallel-size {args.context_parallel_size}: local attention does not compute --window-size "
            "over parts of a sequence: give --transformer-impl transformer_engine"
        )
    if args.attention_backend == "local" and args.transformer_impl != "local":
        raise ValueError(
            f"--attention-backend local needs --transformer-impl local: use unfused with {args.transformer_impl}"
        )


def check_fp8(args: Arguments, has_cuda: bool) -> None:
    """Raise `ValueError` if a flag of fp8 has no effect, or if no device computes in fp8."""
    if args.fp8_format is None:
        for name in ("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_param_gather"):
            if getattr(args, name) != Arguments.__dataclass_fields__[name].default:
                raise ValueError(f"{flag_name(name)} needs --fp8-format")
        return
    if not has_cuda:
        raise ValueError(
            f"--fp8-format {args.fp8_format} needs a GPU with fp8 arithmetic, and torch finds none on this machine: "
            "use --bf16"
        )


def check_experts(args: Arguments, has_cuda: bool) -> None:
    """Raise `ValueError` if the flags of experts contradict each other, or do not divide the ranks of a stage or the
    experts."""
    experts, ranks, tensor = args.num_experts, args.expert_model_parallel_size, args.tensor_model_parallel_size
    stage, expert = args.world_size // args.pipeline_model_parallel_size, args.expert_tensor_parallel_size
    if stage % (ranks * (expert or tensor)):
        shared = f"--expert-tensor-parallel-size {expert}" if expert else f"--tensor-model-parallel-size {tensor}"
        raise ValueError(
            f"--expert-model-parallel-size {ranks} x {shared} must divide the {stage} ranks of a pipeline stage"
        )
    if experts is None and ranks > 1:
        raise ValueError(f"--expert-model-parallel-size {ranks} needs --num-experts")
    if (experts or 1) % ranks:
        raise ValueError(f"--expert-model-parallel-size {ranks} must divide --num-experts {experts}")
    is_grouped = args.moe_grouped_gemm and args.transformer_impl == "transformer_engine"
    if experts is not None and not (args.disable_bias_linear or is_grouped):
        raise ValueError(
            f"--num-experts {experts} needs --disable-bias-linear, or --moe-grouped-gemm with Transformer Engine"
        )
    if experts is not None and tensor > 1 and not args.sequence_parallel:
        raise ValueError(
            f"--num-experts {experts} with --tensor-model-parallel-size {tensor} needs --sequence-parallel: "
            "megatron-core trains no experts without it"
        )
    if args.moe_grouped_gemm and not has_cuda:
        raise ValueError("--moe-grouped-gemm needs CUDA, because it is a CUDA kernel: leave it out")
    if experts is None:
        return
    if not 1 <= args.moe_router_topk <= experts:
        raise ValueError(f"--moe-router-topk {args.moe_router_topk} is not between 1 and --num-experts {experts}")
    if "sinkhorn" in args.moe_router_load_balancing_type and np.any(args.moe_aux_loss_coeff):
        raise ValueError(
            "--moe-aux-loss-coeff with --moe-router-load-balancing-type sinkhorn: megatron-core balances Sinkhorn's "
            "routes without a loss: leave the coefficient out"
        )
    if args.moe_apply_probs_on_input and args.moe_router_topk > 1:
        raise ValueError(
            f"--moe-apply-probs-on-input needs --moe-router-topk 1, got {args.moe_router_topk}: each of several "
            "experts would need an input of its own"
        )


def check_recomputation(args: Arguments, *, for_this_machine: bool) -> None:
    """Refuse recomputation flags that contradict each other, and modules that megatron-core cannot recompute.

    Args:
        for_this_machine: whether the job runs with the packages of this machine.

    Raises:
        ValueError: a flag is refused; the message names the first such flag.
    """
    if args.recompute_activations and args.recompute_granularity != "selective":
        raise ValueError(
            f"--recompute-activations is --recompute-granularity selective, but {args.recompute_granularity} is given"
        )
    modules = (args.recompute_modules or []) if args.recompute_granularity == "selective" else []
    # The recomputed MLP also returns its bias, which autograd then treats as a result of the MLP, in an endless graph.
    if "mlp" in modules and not args.disable_bias_linear:
        raise ValueError("--recompute-modules mlp needs --disable-bias-linear: megatron-core hangs with biases")
    if for_this_machine and find_spec("transformer_engine") is None:
        for module in _OF_TRANSFORMER_ENGINE:
            if module in modules:
                raise ValueError(
                    f"--recompute-modules {module} needs the package transformer_engine: leave {module} out, or use "
                    "--recompute-granularity full"
                )


def check_fully_sharded(args: Arguments) -> None:
    """Refuse flags that do not work with `--use-torch-fsdp2`.

    Raises:
        ValueError: a flag is refused; the message names the first such flag.
    """
    if not args.use_torch_fsdp2:
        return
    for (name, refused), reason in _NOT_WITH_FSDP.items():
        value = getattr(args, name)
        if value and refused in (None, value):
            raise ValueError(f"{flags_text({name: value})} does not work with {_FSDP}: {reason}")
    if not args.untie_embeddings_and_output_weights:
        raise ValueError(f"{_FSDP} needs --untie-embeddings-and-output-weights: FSDP cannot share a weight")
