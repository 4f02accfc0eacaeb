"""Checks that the model, optimizer and learning-rate schedule of a checkpoint match the flags."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping
from typing import Any

from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.trainer.arguments import Arguments

_MODEL_SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("position_embedding_type", "normalization", "swiglu", "quick_geglu"),
    *("untie_embeddings_and_output_weights", "disable_bias_linear", "num_experts", "mtp_num_layers"),
    *("apply_layernorm_1p", "multi_latent_attention", "q_lora_rank", "kv_lora_rank"),
    *("moe_layer_freq", "moe_shared_expert_intermediate_size"),
)
_MODEL_COMPUTATION = (
    *("window_size", "norm_epsilon", "qk_l2_norm", "rotary_base", "rotary_percent", "rotary_interleaved"),
    *("use_rope_scaling", "rotary_seq_len_interpolation_factor", "window_attn_skip_freq", "no_rope_freq"),
    *("softmax_type", "apply_query_key_layer_scaling", "squared_relu"),
    *("glu_linear_offset", "activation_func_clamp_value"),
)
"""Flags that change a model's computation, but not its parameters; with `--finetune`, the values of the flags may
differ from the values in the checkpoint."""
_COMPUTATION_WITH = {
    "use_rope_scaling": ("rope_scaling_factor",),
    "multi_latent_attention": ("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
    "num_experts": (
        *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
        *("moe_router_num_groups", "moe_router_group_topk"),
    ),
}
"""Flag -> further flags of the model's computation, which have an effect only with this flag."""
_DEFAULTS = {"rope_type": "yarn"}
"""Flag of the model's computation -> value in megatron-core's configuration if the flag is not given."""
_OPTIMIZER_SETTINGS = {"adam": ("adam_beta1", "adam_beta2", "adam_eps"), "sgd": ("sgd_momentum",)}
"""Optimizer -> flags whose values are part of the optimizer's state; loading the state would replace the values."""
_DATA_ORDER = ("seed", "split", "seq_length", "data_path")
"""Flags that determine the order of the training data, beside the number of samples."""
DECOUPLED_RATES = ("decoupled_lr", "decoupled_min_lr")
"""Flags that belong to the learning-rate schedule, but are missing in the state of the learning-rate scheduler."""
_SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_decay_style": "--lr-decay-style",
    "lr_warmup_steps": "--lr-warmup-iters",
    "lr_decay_steps": "--lr-decay-iters",
    "start_wd": "--weight-decay",
    "end_wd": "--weight-decay",
    "wd_incr_steps": "--train-iters",
    **{name: flag_name(name) for name in DECOUPLED_RATES},
}
"""Name of a value in the state of the learning-rate scheduler -> flag that sets this value. The scheduler counts steps
in samples."""


def check_model_shape(args: Arguments, saved: argparse.Namespace) -> None:
    """Raise `ValueError` if the checkpoint's flags `saved` and the flags `args` describe different models."""
    pairs = {name: (getattr(args, name), getattr(saved, name, None)) for name in _MODEL_SHAPE}
    pairs["hybrid_layer_pattern"] = (_layers(args), _layers(saved))
    # Without --group-query-attention, each head is a query group, although Megatron-LM saves num_query_groups=1.
    is_grouped = getattr(saved, "group_query_attention", True)
    saved_groups = getattr(saved, "num_query_groups" if is_grouped else "num_attention_heads", None)
    pairs["num_query_groups"] = (args.num_query_groups, saved_groups)
    if args.position_embedding_type == "learned_absolute":
        saved_positions = getattr(saved, "max_position_embeddings", None)
        pairs["max_position_embeddings"] = (args.max_position_embeddings, saved_positions)
    different = {name: values for name, values in pairs.items() if values[1] not in (None, values[0])}
    if not args.finetune:
        of_parts = [names for part, names in _COMPUTATION_WITH.items() if getattr(args, part)]
        for name in itertools.chain(_MODEL_COMPUTATION, *of_parts):
            if not (hasattr(args, name) and hasattr(saved, name)):
                continue  # another version of megatron-core may lack the flag
            given = (getattr(args, name), getattr(saved, name))
            ours, theirs = (_DEFAULTS.get(name) if value is None else value for value in given)
            if ours != theirs:
                different[name] = ours, theirs
    for name, (ours, theirs) in different.items():
        flag, checkpoint = flag_name(name), f"the checkpoint in --load {args.load}"
        if isinstance(ours, bool):
            saved_with, change = ("with", "give") if theirs else ("without", "leave out")
            raise ValueError(f"{checkpoint} was saved {saved_with} {flag}: {change} this flag")
        raise ValueError(f"{flag} {ours}: {checkpoint} was saved with {theirs}")
    saved_rows = getattr(saved, "padded_vocab_size", args.padded_vocab_size)
    if args.padded_vocab_size == saved_rows:
        return
    tensor, multiple = args.tensor_model_parallel_size, args.make_vocab_size_divisible_by
    remedy = f"--tensor-model-parallel-size must divide {saved_rows}"
    if saved_rows % tensor == 0:
        remedy = f"with the same tokenizer, give --make-vocab-size-divisible-by {saved_rows // tensor}"
    raise ValueError(
        f"--make-vocab-size-divisible-by {multiple} x --tensor-model-parallel-size {tensor} pads the vocabulary to "
        f"{args.padded_vocab_size} rows, but the checkpoint in --load {args.load} has {saved_rows}: {remedy}"
    )


def _layers(args: Any) -> str | None:
    """Return the layer symbols of a hybrid model without the separators between stages; None for a GPT model."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    return None if pattern is None else HybridPattern.parse(pattern).symbols


def reordered_data(args: Arguments, saved: argparse.Namespace) -> str | None:
    """Return a log line if flags may give the data another order than in the saved run; None if they do not."""
    names = [*_DATA_ORDER, *(f"{split}_data_path" for split in ("train", "valid"))]
    sizes = ("train_iters", "global_batch_size")
    if all(getattr(saved, name, None) for name in sizes):
        ours, theirs = ([getattr(flags, name) for name in sizes] for flags in (args, saved))
        names += sizes if math.prod(ours) != math.prod(theirs) else ()
    changed = {
        name: saved_value
        for name in names
        if (saved_value := getattr(saved, name, None)) not in (None, getattr(args, name))
    }
    if not changed:
        return None
    was = ", ".join(f"{flag_name(name)} {value}" for name, value in changed.items())
    return f"  the order of the data may differ from the checkpoint's run, which had {was}"


def check_optimizer(args: Arguments, saved: argparse.Namespace) -> None:
    """Raise `ValueError` if the saved optimizer state does not belong to the optimizer that the flags describe."""
    ours, theirs = _optimizer_form(args), _optimizer_form(saved)
    if ours != theirs:
        raise ValueError(
            f"--load {args.load}: the optimizer's state was saved with {theirs}, and cannot be loaded with {ours}: "
            "give the flags of that run, or --no-load-optim"
        )
    was_constant = getattr(saved, "loss_scale", None) if getattr(saved, "fp16", False) else None
    if args.fp16 and args.loss_scale is None and was_constant is not None:
        raise ValueError(
            f"--fp16: the optimizer's state in --load {args.load} was saved with --loss-scale {was_constant} and holds "
            f"no dynamic loss scale: give --loss-scale {was_constant}, or --no-load-optim"
        )
    for name in _OPTIMIZER_SETTINGS[args.optimizer]:
        value, was = getattr(args, name), getattr(saved, name, None)
        if was is not None and was != value:
            flag = flag_name(name)
            raise ValueError(
                f"{flag} {value}: the optimizer's state in --load {args.load} was saved with {was} and keeps "
                f"this value: give {flag} {was}, or --no-load-optim"
            )


def _optimizer_form(flags: Arguments | argparse.Namespace) -> str:
    """Return, as text, the flags that determine the tensors and the parameter groups of an optimizer's state.

    The state of a distributed optimizer has the same tensors in fp32, bf16 and fp16 training. The state of any other
    optimizer has the same tensors in bf16 and fp16 training, but other tensors in fp32 training.
    """
    name = f"--optimizer {getattr(flags, 'optimizer', 'adam')}"  # checkpoints of version 0.1.0 have only adam
    if getattr(flags, "decoupled_lr", None) is not None:
        name += " --decoupled-lr"
    if _spreads_experts(flags):  # megatron-core gives the parameters of experts a separate optimizer
        name += " --expert-model-parallel-size > 1"
    if getattr(flags, "use_distributed_optimizer", False):
        return f"{name} --use-distributed-optimizer"
    is_mixed = getattr(flags, "bf16", False) or getattr(flags, "fp16", False)
    return f"{name} in {'bf16 or fp16' if is_mixed else 'fp32'}"


def has_same_ranks(args: Arguments, saved: argparse.Namespace) -> bool:
    """Return whether this job and the saved job agree in the parallel sizes on which the saved random states depend."""
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    if _spreads_experts(args) or _spreads_experts(saved):
        names += ["expert_model_parallel_size", "world_size"]
    return all(getattr(saved, name, None) == getattr(args, name) for name in names)


def _spreads_experts(flags: Arguments | argparse.Namespace) -> bool:
    return getattr(flags, "expert_model_parallel_size", 1) > 1


def check_schedule(args: Arguments, ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a learning-rate schedule that differs from the checkpoint's, unless a flag says which schedule to use."""
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
        return
    for name, flag in _SCHEDULE_FLAGS.items():
        if name in saved and saved[name] != ours[name]:
            if flag == "--lr-decay-iters" and args.lr_decay_iters is None:
                flag = "--train-iters"
            unit = " samples" if name.endswith("_steps") else ""
            raise ValueError(
                f"--load {args.load}: the learning rate's schedule differs: {flag} gives {ours[name]}{unit}, "
                f"the checkpoint has {saved[name]}{unit}: give the flags of that run, --override-opt-param-scheduler "
                "to use the flags, or --use-checkpoint-opt-param-scheduler to use the checkpoint's schedule"
            )
