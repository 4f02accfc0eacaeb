"""Counts parameters, floating-point operations and activations of the model that the flags describe.

Each unit of the model (embedding, layer or output) is built on the meta device with the shapes of one tensor-parallel
rank, and runs one microbatch. `model_count` counts the parameters, the matrix products and the tensors saved by
autograd in megatron-core's own modules. For layers that `mcore/counted_layers.py` replaces, `model_count` counts the
matrix products and the saved tensors of the GPU kernels instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.zero_bubble.mcore.counted_layers import (
    AttentionKernel,
    convolution_backward_flops,
    count_as_kernels,
    expert_parameters,
    gathered_features,
)
from megatron.zero_bubble.mcore.linear import split_weight_gradients
from megatron.zero_bubble.mcore.meta_device import on_meta_device
from megatron.zero_bubble.mcore.model_units import Unit
from megatron.zero_bubble.mcore.unit_run import clear_losses
from megatron.zero_bubble.runtime.memory_meter import SavedTensorMeter
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind
from megatron.zero_bubble.session.model_states import Parameters, element_bytes
from megatron.zero_bubble.trainer.activations import activation_fields, fuses_activation
from megatron.zero_bubble.trainer.arguments import TORCH_BACKENDS, Arguments
from megatron.zero_bubble.trainer.core_errors import as_users_mistake
from megatron.zero_bubble.trainer.model import build_unit, layer_kinds, transformer_config, unit_config

_PLAIN: dict[str, Any] = {
    "transformer_impl": "local",
    "moe_use_legacy_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_shared_expert_overlap": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "tp_comm_overlap": False,
    "fine_grained_activation_offloading": False,
    "use_te_activation_func": False,
    "cross_entropy_fusion_impl": "native",
    "fp8_format": None,
    "fp8_param_gather": False,
    "fp4_format": None,
    "fp4_param_gather": False,
    "moe_router_padding_for_fp8": False,
    "moe_router_padding_for_quantization": False,
    "moe_enable_deepep": False,
    "memory_efficient_layer_norm": False,
    "deterministic_mode": False,
}
"""Values for flags that choose GPU kernels; the counts do not depend on the chosen kernels."""


_ALONE: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 1,
    "pipeline_model_parallel_layout": None,
    "micro_batch_size": 1,
    "recompute_granularity": None,
    "fp16": False,
}
"""Values of flags for an unsharded model on a single rank."""


class Flops(NamedTuple):
    """Floating-point operations of one microbatch; each multiplication and each addition counts as one operation."""

    f: float
    b: float
    """Floating-point operations of B, including selective recomputation."""
    w: float
    r: float = 0.0
    """Floating-point operations of full recomputation."""

    @property
    def total(self) -> float:
        return sum(self)


class Activations(NamedTuple):
    """Bytes of the activations of one microbatch."""

    after_f: float
    """Bytes of activations held from F to B if no layer is fully recomputed."""
    after_b: float
    """Bytes of activations held from B to W: each linear layer's input and the gradient of its output."""


@dataclass(frozen=True)
class UnitCount:
    """Parameters, floating-point operations and activations of a unit of the model on one tensor-parallel rank."""

    parameters: Parameters
    flops: Flops
    activations: Activations
    whole: int
    """Number of distinct parameters on all tensor- and expert-parallel ranks, without multi-token prediction."""
    further: int
    """Number of distinct parameters of multi-token prediction on all tensor- and expert-parallel ranks."""


@dataclass(frozen=True)
class ModelCount:
    """Parameters, floating-point operations and activations of every unit of a model, on a rank that has the unit."""

    embedding: UnitCount
    layers: tuple[UnitCount, ...]
    output: UnitCount
    """Counts of multi-token prediction, final norm, output layer and loss together."""
    input_bytes: float
    """Size in bytes of a layer's input, which is also the size of a message between stages."""

    @property
    def units(self) -> tuple[UnitCount, ...]:
        return self.embedding, *self.layers, self.output


def count_model(args: Arguments) -> ModelCount:
    """Count the parameters, floating-point operations and activations of all units of a model.

    `args` must have all defaults and the padded vocabulary size filled in. `count_model` needs neither a device nor
    another process. While `count_model` runs, there must be no default process group.

    Raises:
        ValueError: megatron-core refuses the model.
    """
    transformer_config(replace(_plain(args), **_ALONE), 1, None)
    kinds = layer_kinds(args)
    units = [Unit(embeds=True), *(Unit(layer=kind) for kind in range(max(kinds) + 1)), Unit(is_last=True)]
    tensor = args.tensor_model_parallel_size
    with on_meta_device(
        tensor=tensor,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or tensor,
    ):
        embedding, *layers, output = (_count(args, unit) for unit in units)
    input_bytes = element_bytes(args) * rank_tokens(args) * args.hidden_size / (tensor if args.sequence_parallel else 1)
    return ModelCount(embedding, tuple(layers[kind] for kind in kinds), output, input_bytes)


def flops_of_sequence(args: Arguments) -> float:
    """Count the floating-point operations of training on one sequence, as Megatron-LM counts them.

    Each matrix product counts three times: for F, B and W. The matrix products of attention count only for pairs of
    query and key that the attention mask allows. A causal mask without a window allows half of all pairs of query and
    key. Recomputation adds no operations to the count.
    """
    fused: dict[str, Any] = {"transformer_impl": "transformer_engine", "attention_backend": "auto", "bf16": True}
    return 3 * sum(unit.flops.f for unit in count_model(replace(args, **fused, **_ALONE)).units)


def attention_kernel(args: Arguments) -> AttentionKernel:
    """Return the attention kernel that training with the flags `args` uses; `args` must have all defaults filled in.

    Transformer Engine has no fused attention kernel in fp32. For grouped-query attention, torch has no fused kernel if
    the mask is a tensor or the precision is fp32.
    """
    half = element_bytes(args) == 2
    if args.transformer_impl == "transformer_engine":
        if not half or args.attention_backend == "unfused":
            return AttentionKernel.TE_UNFUSED
        return AttentionKernel.TE_FLASH if args.attention_backend == "flash" else AttentionKernel.TE_FUSED
    if args.attention_backend not in TORCH_BACKENDS:
        return AttentionKernel.LOCAL
    has_mask = args.reset_attention_mask or args.context_parallel_size > 1
    fits = args.num_query_groups == args.num_attention_heads or (half and not has_mask)
    return AttentionKernel.TORCH if fits else AttentionKernel.TORCH_MATH


def rank_tokens(args: Arguments) -> int:
    """Return the number of tokens of a microbatch on one context-parallel rank."""
    return args.micro_batch_size * args.seq_length // args.context_parallel_size


def _plain(args: Arguments) -> Arguments:
    """Return a copy of `args` for a model of local layers, whose floating-point operations can be counted."""
    backend = "local" if args.transformer_impl == "transformer_engine" else args.attention_backend
    # Sinkhorn's iterations depend on the router's values; they compute little.
    balancing = (
        {"moe_router_load_balancing_type": "none"} if "sinkhorn" in str(args.moe_router_load_balancing_type) else {}
    )
    # Local experts cannot run with biases, which are a small part of the parameters.
    has_biases = bool(args.num_experts) and not args.disable_bias_linear
    biases = {"disable_bias_linear": True, "add_qkv_bias": True} if has_biases else {}
    plain = {name: value for name, value in _PLAIN.items() if hasattr(args, name)}  # not every version has every field
    return replace(args, **{"attention_backend": backend, **balancing, **biases, **plain})


@as_users_mistake("this model", AssertionError)
def _count(args: Arguments, unit: Unit) -> UnitCount:
    plain, store = _plain(args), WeightGradStore()
    config = unit_config(plain, unit)
    config.use_cpu_initialization = config.gradient_accumulation_fusion = False
    for name, value in {"bias_activation_fusion": fuses_activation(args), **activation_fields(args)}.items():
        setattr(config, name, value)
    model = build_unit(plain, config, unit).to(config.params_dtype)  # as Float16Module does
    count_as_kernels(model, attention_kernel(args))
    parameters = _parameters(model)
    whole, further = _whole_parameters(args, model)
    split_weight_gradients([model], store)
    operations = list[float]()
    f, b, inputs = Op(OpKind.F, 0, 0), Op(OpKind.B, 0, 0), _microbatch(args, model)
    with ExitStack() as ended:
        ended.callback(clear_losses)
        meter = ended.enter_context(closing(SavedTensorMeter(store)))
        with _counted(operations):
            meter.begin(f)
            output = model(**inputs)
            after_f = meter.end(f)
        with _counted(operations), store.deferring():
            torch.autograd.backward(output, torch.empty_like(output))
        store.flush(0, 0)
        after_b = after_f + meter.end(b) + _gathered_bytes(args, model)
    with _counted(operations):
        store.pop(0, 0)
    return UnitCount(parameters, Flops(*operations), Activations(after_f, after_b), whole, further)


def _gathered_bytes(args: Arguments, model: Any) -> float:
    """Return the bytes that Transformer Engine's layers keep from B to W in addition to the memory of local layers."""
    if args.transformer_impl != "transformer_engine" or not args.sequence_parallel:
        return 0.0
    from_other_ranks = rank_tokens(args) * (1 - 1 / args.tensor_model_parallel_size)
    return element_bytes(args) * from_other_ranks * gathered_features(model)


@contextmanager
def _counted(operations: list[float]) -> Iterator[None]:
    """Append to `operations` the number of floating-point operations in the `with` block."""
    formulas = {torch.ops.aten.convolution_backward: convolution_backward_flops}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        yield
    operations.append(float(counter.get_total_flops()))


def _microbatch(args: Arguments, model: Any) -> dict[str, Any]:
    """Return the inputs of a unit for one microbatch; a unit without the embedding also gets the hidden states."""
    batch, tokens = args.micro_batch_size, rank_tokens(args) // args.micro_batch_size
    numbers = torch.zeros(batch, tokens, dtype=torch.long)
    if not model.pre_process:
        rows = tokens // (args.tensor_model_parallel_size if args.sequence_parallel else 1)
        hidden = torch.empty(rows, batch, args.hidden_size, dtype=model.config.params_dtype, requires_grad=True)
        model.set_input_tensor(hidden)
    mask = torch.ones(batch, 1, tokens, args.seq_length, dtype=torch.bool) if args.reset_attention_mask else None
    inputs = {"input_ids": numbers, "position_ids": numbers, "attention_mask": mask}
    if model.post_process:
        inputs["labels"] = numbers
    if model.mtp_process:
        inputs["loss_mask"] = torch.ones(batch, tokens)
    return inputs


def _parameters(model: torch.nn.Module) -> Parameters:
    experts = expert_parameters(model)
    dense = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in experts)
    return Parameters(dense, sum(parameter.numel() * experts.get(id(parameter), 0) for parameter in model.parameters()))


def _whole_parameters(args: Arguments, model: Any) -> tuple[int, int]:
    """Count a unit's distinct parameters on all ranks; parameters of multi-token prediction are in the second count."""
    experts, tensor = expert_parameters(model), args.tensor_model_parallel_size
    whole = further = 0
    for name, parameter in model.named_parameters():
        is_copy = not model.pre_process and (
            name.startswith("embedding.")
            or (name == "output_layer.weight" and model.share_embeddings_and_output_weights)
        )
        num_experts = experts.get(id(parameter))
        split = tensor if num_experts is None else args.expert_tensor_parallel_size or tensor
        count = parameter.numel() * (split if parameter.tensor_model_parallel else 1)
        count *= 1 if num_experts is None else num_experts * args.expert_model_parallel_size
        if name.startswith("mtp."):
            further += count
        elif not is_copy:
            whole += count
    return whole, further
