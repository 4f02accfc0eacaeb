"""Shards a chunk's parameters, gradients and optimizer state over replicas (ZeRO-2 and ZeRO-3) under any schedule.

This module uses torch's FSDP2 in megatron-core's wrapper. FSDP2 expects autograd to compute all gradients of a layer in
the layer's backward, and reduces the gradients at the end of this backward. In a zero-bubble schedule, W computes the
gradients of weights later and outside of autograd. If B and W are separate operations, FSDP2's backward of a layer
accumulates the layer's gradients without reducing them. This module reduces the gradients of a layer after the layer's
W: after the last W of a step, or after the W of every microbatch. torch's pipelines similarly reduce gradients after
the last backward. The reduced gradients equal the gradients of DDP, because FSDP2 and DDP sum gradients in the same
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.distributed import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

_SUMS_IN_LEAVES = hasattr(FSDPParam, "unsharded_accumulated_grad")
"""Whether FSDP2 sums unreduced gradients in `.grad` of the gathered parameters, as it does from torch 2.15 on. Older
versions of FSDP2 sum unreduced gradients in an attribute of each `FSDPParam`."""


class FullyShardedChunk(TorchFullyShardedDataParallel):
    """A model chunk that is sharded over replicas; each replica gathers a layer's parameters for F and for B.

    Call `split_weight_gradients` on `module` before the `FullyShardedChunk` is created.

    Args:
        module: the chunk with all its parameters, already on its device.
        keeps_parameters: whether a layer's parameters, once gathered, stay gathered until the end of the step (ZeRO-2).
        reduces_every_microbatch: whether the gradients of a layer are reduced after every W of the layer, so that no
            replica holds unsharded gradients. If `reduces_every_microbatch` is false, gradients are reduced only after
            the layer's last W of a step.
        gradient_dtype: type in which gradients are summed over microbatches and replicas. The optimizer gets the summed
            gradients in the type of the parameters, as in FSDP2.

    Raises:
        ValueError: the number of rows of a parameter is not divisible by the number of replicas.
    """

    def __init__(
        self,
        config: TransformerConfig,
        module: torch.nn.Module,
        *,
        keeps_parameters: bool,
        reduces_every_microbatch: bool,
        gradient_dtype: torch.dtype,
    ) -> None:
        name = "register_wgrad_accumulation_and_reduce_hooks"
        # Weight whose gradient W computes -> function that registers a callback after the W of this weight.
        hooks = {(id(layer), "weight"): getattr(layer, name) for layer in module.modules() if hasattr(layer, name)}
        # With overlap, the reduction of a layer's gradients begins before the W of other layers.
        ddp_config = TorchFullyShardedDataParallelConfig(
            reshard_after_forward=not keeps_parameters,
            delay_wgrad_compute=True,
            overlap_grad_reduce=not reduces_every_microbatch,
        )
        super().__init__(config, ddp_config, module, sub_modules_to_wrap={TransformerLayer, LanguageModelEmbedding})
        self._keeps_parameters, self._reduces_every_microbatch = keeps_parameters, reduces_every_microbatch
        self._gradient_dtype = gradient_dtype
        self._is_last_microbatch = True
        self._num_ready: Counter[int] = Counter()
        self._sums: dict[Any, torch.Tensor] = {}
        """`FSDPParam` -> sum of the gradients that W has computed since the parameter's last reduction."""
        modules: list[Any] = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._root, *layers = modules
        self._layers = [layer for layer in layers if _fsdp_group(layer) is not None]
        self._groups = [group for part in modules if (group := _fsdp_group(part)) is not None]
        self._set_up_reduction()
        self._set_up_gathering()
        for group in self._groups:
            weights = [parameter for parameter in group.fsdp_params if _owner_and_name(parameter) in hooks]
            for parameter in weights:
                hooks[_owner_and_name(parameter)](partial(self._add_weight_gradient, group, parameter, len(weights)))

    def _set_up_reduction(self) -> None:
        replicas = self.process_group.size()
        for group in self._groups:
            group.mp_policy = MixedPrecisionPolicy(reduce_dtype=self._gradient_dtype)
            for parameter in group.fsdp_params:
                parameter.mp_policy = group.mp_policy
                rows = parameter._orig_size[0]
                if rows % replicas:
                    name = f"{type(parameter._module_info.module).__name__}.{parameter._module_info.param_name}"
                    raise ValueError(f"the {rows} rows of {name} do not divide among {replicas} replicas")
        if self.config.calculate_per_token_loss:
            # finalize_model_grads divides by the number of tokens, with `scale_gradients`.
            for part in (self._root, *self._layers):
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)
        self._root.set_requires_gradient_sync(False)
        self._root.set_is_last_backward(False)
        self._root.set_reshard_after_backward(not self._keeps_parameters)
        self._root._get_fsdp_state()._lazy_init()

    def _set_up_gathering(self) -> None:
        """While a layer computes, let FSDP2 gather the parameters of the next layer.

        By default, FSDP2's backward gathers layers in the reverse order of the latest forwards, but in a pipeline the
        latest forwards may belong to other microbatches.
        """
        order = [self._root, *self._layers]
        for before, after in pairwise(order):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        self._root.set_modules_to_backward_prefetch(order[-1:])

    def gather_ahead(self, *, is_forward: bool) -> None:
        """Start to gather the parameters that an F or B needs first, before the F or B receives its input message."""
        first = self._layers[:1] if is_forward else self._layers[-1:]
        for part in (self._root, *first):
            if (group := _fsdp_group(part)) is not None:
                group.unshard(async_op=True)

    def before_gradients(self, *, is_fused: bool) -> None:
        """Let FSDP2's backward reduce gradients only if the next operation is a fused backward (B and W together)."""
        reduces = is_fused and (self._is_last_microbatch or self._reduces_every_microbatch)
        if any(group.reduce_grads != reduces for group in self._groups):
            self._root.set_requires_gradient_sync(reduces)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Declare that the `with` block computes no gradients of a step's last microbatch."""
        self._is_last_microbatch = False
        try:
            yield
        finally:
            self._is_last_microbatch = True

    def _add_weight_gradient(self, group: Any, parameter: Any, num_weights: int) -> None:
        """Accumulate the gradient that W has computed for one weight.

        If gradients are reduced after this microbatch, the W of the layer's last weight also reduces the layer's
        gradients.
        """
        gathered = parameter.unsharded_param
        gradient, gathered.grad = gathered.grad, None
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.to(self._gradient_dtype)
        if self._is_last_microbatch or self._reduces_every_microbatch:
            self._num_ready[id(group)] += 1
            if self._num_ready[id(group)] == num_weights:
                del self._num_ready[id(group)]
                self._reduce(group)

    def _reduce(self, group: Any) -> None:
        for parameter in group.fsdp_params:
            if (total := self._sums.pop(parameter, None)) is None:
                continue
            if _SUMS_IN_LEAVES:
                parameter.unsharded_param.grad = total
            else:
                parameter.unsharded_accumulated_grad = total
        reduces, group.reduce_grads = group.reduce_grads, True
        state = group._training_state
        group.post_backward()
        group.reduce_grads, group._training_state = reduces, state

    def finish_grad_sync(self, *unused: Any, **also_unused: Any) -> None:
        """Reduce the gradients that are not reduced yet, such as the embedding's gradient, and wait for all reductions.

        `finalize_model_grads` calls `finish_grad_sync` at the end of each step, also with megatron-core's schedules.
        """
        self._root.set_is_last_backward(True)
        for group in reversed(self._groups):
            self._reduce(group)
        self._root._get_fsdp_state()._root_post_backward_final_callback()
        self._root.set_is_last_backward(False)
        self.free_gathered()

    def free_gathered(self) -> None:
        """Free all gathered parameters; called when no further F or B needs the gathered values."""
        for part in (self._root, *self._layers):
            part.reshard()

    def gathered_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that a replica holds in addition to shards: gathered parameters and unreduced gradients."""
        for group in self._groups:
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs
                gathered = getattr(parameter, "_unsharded_param", None)
                sums = self._sums.get(parameter), None if _SUMS_IN_LEAVES else parameter.unsharded_accumulated_grad
                gradients = (*sums, None if gathered is None else gathered.grad)
                yield from (gradient for gradient in gradients if gradient is not None)

    def zero_grad_buffer(self) -> None:
        """Drop all gradients that are not reduced yet; in DDP, this method sets the sums of gradients to zero."""
        self._sums.clear()
        self._num_ready.clear()
        for parameter in (each for group in self._groups for each in group.fsdp_params):
            if not _SUMS_IN_LEAVES:
                parameter.unsharded_accumulated_grad = None
            if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
                gathered.grad = None

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients by `scaling_factor`; called after the gradients are reduced."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scaling_factor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor; if `tensor` is a replica's shard, all replicas must call `whole` together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fully_sharded(chunks: Sequence[torch.nn.Module]) -> list[FullyShardedChunk]:
    """Return the chunks whose parameters are sharded over replicas by `FullyShardedChunk`."""
    return [chunk for chunk in chunks if isinstance(chunk, FullyShardedChunk)]


def _fsdp_group(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def _owner_and_name(parameter: Any) -> tuple[int, str]:
    """Return the id of the module that holds a parameter, and the parameter's name in the module."""
    return id(parameter._module_info.module), parameter._module_info.param_name
