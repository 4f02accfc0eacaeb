"""Makes flags from the fields of megatron-core's configurations, and configuration values from the flags.

The name of a field's flag is in the field's metadata or in `_NAMES`. If neither the metadata nor `_NAMES` gives a name,
the flag is named after the field: `--FIELD`, or `--no-FIELD` for a boolean field whose default is True. Fields whose
names match `_WITHOUT_FLAG`, and fields whose values no command line can give, such as functions, have no flag.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields, make_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from operator import not_
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.session.flag_parser import flag

# On a CPU, megatron-core is imported after `substitute_cuda()`; otherwise the import compiles code for minutes.
substitute_cuda().restore()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

_TITLES = {
    TransformerConfig: "Model and parallelism, of megatron-core's TransformerConfig.",
    MLATransformerConfig: "Multi-latent attention, of megatron-core's MLATransformerConfig.",
    OptimizerConfig: "Optimizer, of megatron-core's OptimizerConfig.",
    DistributedDataParallelConfig: "Data parallelism, of megatron-core's DistributedDataParallelConfig.",
}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}
"""Name of a data type in Megatron-LM's flags -> the data type."""
_NAMES = {
    "num_moe_experts": "--num-experts",
    "fp8_param": "--fp8-param-gather",
    "bucket_size": "--ddp-bucket-size",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
    "average_in_collective": "--ddp-average-in-collective",
}
"""Configuration field whose metadata contains no flag name -> the flag's name in Megatron-LM."""
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "lr")
_DEFAULTS: Mapping[str, Any] = {
    "min_lr": 0.0,
    "attention_backend": "auto",
    "transformer_impl": "local",
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "rotary_scaling_factor": 1.0,
    "rope_type": None,
    "optimizer_offload_fraction": 1.0,
}
"""Field -> default of its flag, if the default differs from the field's own default. Each default in `_DEFAULTS` is
Megatron-LM's default, or a default for megatron-core's layers without Transformer Engine."""
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "transformer_impl": ("local", "transformer_engine"),
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    "optimizer": ("adam", "sgd"),
    "rope_type": ("rope", "yarn"),
}
_WITHOUT_FLAG = re.compile(
    "|".join(
        (
            # The trainer sets these fields, some by flags of other names.
            r"is_hybrid_model|virtual_pipeline_model_parallel_size|params_dtype|pipeline_dtype|autocast_dtype|enable_autocast|_.*",
            r"num_layers_in_.*|account_for_.*|gradient_accumulation_fusion|use_cpu_initialization|.*p2p.*",
            r"(masked_softmax|bias_dropout|bias_activation|apply_rope)_fusion|persist_layer_norm|gated_linear_unit",
            r"attention_softmax_in_fp32|deallocate_pipeline_outputs|barrier_with_L1_time",
            r"grad_reduce_in_fp32|check_for_nan_in_grad|align_param_gather|mtp_standalone|decoupled_weight_decay",
            # Zero bubble replaces the features of these fields, or zero-bubble schedules do not support the features.
            r"delay_wgrad_compute|defer_embedding_wgrad_compute|wgrad_deferral_limit|overlap_moe_.*|ep_overlap_.*",
            r"num_microbatches_with_partial_activation_checkpoints|overlap_param_gather_with_optimizer_step",
            # These fields belong to models, kinds of replicas and programs that the trainer does not support.
            r"hete.*|linear_attention_.*|dsa_.*|experimental_attention_variant|mrope_section",
            r".*fsdp.*|.*sharding_strategy|nccl_ub|.*symmetric.*|suggested_communication_unit_size|preserve_fp32_weights",
            r"keep_fp8_transpose_cache|h.*_context_parallel.*|max_seqlen_per_dp_cp_rank|muon_.*|.*kitchen.*|.*inference.*",
            r"use_mup|mup_.*|num_buckets|param_name_patterns_for_fp32_local_accumulation",
            r"flash_decode|mlp_chunks_for_prefill|cache_mla_latents|.*cuda_graph.*|test_mode|init_model_with_meta_device",
            r"cpu_offloading.*|qk_clip.*|log_max_attention_logit|moe_per_layer_logging|moe_enable_routing_replay",
            r"use_te_rng_tracker|batch_invariant_mode|pipeline_model_parallel_comm_backend|config_logger_dir",
        )
    )
)
"""Pattern for the names of configuration fields that have no flag."""


_TYPES = {"rotary_base": int}
"""Configuration field -> type of the field's flag, if the flag and the field have different types."""


class CoreFlag(NamedTuple):
    """A flag that sets a field of one of megatron-core's configurations."""

    name: str
    """Name of the attribute that holds the flag's value: `disable_bias_linear` for `--disable-bias-linear`."""
    field: str
    convert: Callable[[Any], Any]
    """Converts the flag's value to the value of the field. The flag's value must not be None."""
    entry: tuple[Any, Any]
    """(type of the flag's attribute, definition of the attribute as a dataclass field)."""


def flag_groups(listed: Collection[str]) -> tuple[type, ...]:
    """Return dataclasses of flags, one for each of megatron-core's configurations.

    Args:
        listed: names of flags to leave out; other dataclasses define these flags.
    """
    seen, groups = set(listed), []
    for config_class, title in _TITLES.items():
        new = {core_flag.name: core_flag.entry for core_flag in core_flags(config_class) if core_flag.name not in seen}
        seen.update(new)
        entries = [(name, *entry) for name, entry in new.items()]
        group = make_dataclass(f"{config_class.__name__}Flags", entries, frozen=True, kw_only=True)
        group.__doc__ = title
        groups.append(group)
    return tuple(groups)


def config_values(args: Any, config_class: type) -> dict[str, Any]:
    """Return the values that the flags give to fields of `config_class`, in a dictionary keyed by field names."""
    values = {}
    for name, field, convert, _ in core_flags(config_class):
        value = getattr(args, name)
        if value is not None:
            values[field] = convert(value)
        elif field not in ("rope_type", "offload_modules"):  # without a flag, these keep defaults other than None
            values[field] = None
    return values


@cache
def core_flags(config_class: type) -> tuple[CoreFlag, ...]:
    """Return the flags of the fields of `config_class`."""
    hints, explanations, flags = _hints(config_class), _explanations(config_class), []
    for entry in fields(config_class):
        kind = hints[entry.name]
        if get_origin(kind) in (Union, UnionType):
            kind = Union[tuple(member for member in get_args(kind) if member is not type(None))]  # noqa: UP007
        form = _form(kind)
        if form is None or _WITHOUT_FLAG.fullmatch(entry.name):
            continue
        is_negated = kind is bool and entry.default is True and entry.name != "multi_latent_attention"
        names = _names(entry, is_negated=is_negated)
        hint, options, convert = form
        hint = _TYPES.get(entry.name, hint)
        options = {**options, "choices": _CHOICES.get(entry.name, options.get("choices")), "names": names[1:]}
        text = explanations.get(entry.name, entry.name.replace("_", " "))
        name = names[0].removeprefix("--").replace("-", "_")
        defined = (hint, flag(text, _default(config_class, entry, hint), **options))
        flags.append(CoreFlag(name, entry.name, not_ if is_negated else convert, defined))
    return tuple(flags)


def _names(entry: Field[Any], *, is_negated: bool) -> list[str]:
    plain = entry.name.replace("_", "-")
    names = [f"--no-{plain}", f"--disable-{plain}"] if is_negated else [f"--{plain}"]
    names = [_NAMES[entry.name]] if entry.name in _NAMES else names
    return list(entry.metadata.get("argparse_meta", {}).get("arg_names", names))


def _default(config_class: type, entry: Field[Any], hint: Any) -> Any:
    if entry.name in _REQUIRED:
        return MISSING
    if hint is bool:
        return False
    if entry.name in _DEFAULTS:
        return _DEFAULTS[entry.name]
    if "default" in entry.metadata.get("argparse_meta", {}):
        return entry.metadata["argparse_meta"]["default"]
    if config_class is MLATransformerConfig and entry.name in _hints(TransformerConfig):
        [entry] = [general for general in fields(TransformerConfig) if general.name == entry.name]
    default = None if entry.default is MISSING else entry.default
    return next((name for name, dtype in _DTYPES.items() if dtype is default), default)


def _form(kind: Any) -> tuple[Any, dict[str, Any], Callable[[Any], Any]] | None:
    """Return the flag's type, the flag's options and `CoreFlag.convert` for a configuration field of type `kind`.

    `_form` returns None if no flag can set the field.
    """
    arguments = [member for member in get_args(kind) if member is not type(None)]
    if kind is bool:
        return bool, {}, _unchanged
    if kind in (int, float, str):
        return kind | None, {}, _unchanged
    if kind is torch.dtype:
        return str, {"choices": tuple(_DTYPES)}, _DTYPES.__getitem__
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str, {"choices": tuple(kind.__members__)}, kind.__members__.__getitem__
    if get_origin(kind) is Literal:
        return str | None, {"choices": tuple(arguments)}, _unchanged
    if get_origin(kind) is tuple:
        return Any, {"parse": _pair, "metavar": "N,N"}, _unchanged
    if get_origin(kind) is list and arguments[0] in (int, float, str):
        return kind, {"nargs": "+"}, _unchanged
    if get_origin(kind) in (Union, UnionType) and get_origin(arguments[-1]) is list and len(arguments) == 2:
        if arguments[0] is int:
            return Any, {"parse": _pattern, "metavar": "N|LIST"}, _unpacked
        return Any, {"parse": arguments[0], "nargs": "+"}, _unpacked
    return None


def _unchanged(value: Any) -> Any:
    return value


def _unpacked(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _pattern(text: str) -> int | list[int]:
    """Parse a layer frequency (an integer), or a list with one integer for each layer, such as `([0]*3+[1]*58)`.

    Raises:
        argparse.ArgumentTypeError: the text is neither an integer nor a list of integers.
    """
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        value = None
    if isinstance(value, int) or (isinstance(value, list) and value and all(isinstance(item, int) for item in value)):
        return value
    raise argparse.ArgumentTypeError(f"expected a number, or a list such as ([0]*3+[1]*58), got {text!r}")


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.List(elts=elements):
            return [_evaluated(element) for element in elements]
        case ast.BinOp(left=left, op=operator, right=right):
            match operator, _evaluated(left), _evaluated(right):
                case ast.Add(), list(first), list(second):
                    return first + second
                case ast.Mult(), list(first), int(count) if len(first) * count <= 10000:
                    return first * count
    raise ValueError


def _pair(text: str) -> tuple[int, ...]:
    try:
        first, second = (int(word) for word in text.strip("()").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two numbers such as 128,0, got {text!r}") from None
    return first, second


@cache
def _hints(config_class: type) -> dict[str, Any]:
    return get_type_hints(config_class)


def _explanations(config_class: type) -> dict[str, str]:
    """Return the first sentence of each field's docstring in the source, in a dictionary keyed by field names."""
    sentences: dict[str, str] = {}
    for owner in reversed(config_class.__mro__[:-1]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as words)):
                    sentences[name] = re.split(r"(?<=[a-z\)])\.\s", " ".join(words.split()))[0].rstrip(".")
    return sentences
