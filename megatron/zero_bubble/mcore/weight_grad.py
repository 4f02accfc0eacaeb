"""Computes W, the deferred weight gradients, for megatron-core's linear layers and hands these gradients to DDP.

At its end, W calls a hook of megatron-core's DDP. The hook adds `param.grad` to `main_grad`, and starts the reduction
of a bucket once the bucket is complete. DDP's hook adds the gradients of a weight in the same order as without
deferral. If the config of DDP sets `delay_wgrad_compute`, DDP passes its hook to every module that has the method
`register_wgrad_accumulation_and_reduce_hooks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch.autograd.graph import get_gradient_edge

from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore


class SplitWeight:
    """The weight of one or several linear layers, whose gradient W computes; tells DDP when the gradient is complete.

    Args:
        weight: the parameter.
        name: name of a layer that has the weight.
        store: the store that defers W.
    """

    def __init__(self, weight: torch.nn.Parameter, name: str, store: WeightGradStore) -> None:
        self.name, self.store = name, store
        self.sums = MicrobatchSums(store)
        self._hook: Callable[[], None] | None = None
        self._accumulation: Any = None
        # A weak reference, because FSDP2 replaces the weight by its shards, and must be able to free the whole weight.
        self._weight = weakref.ref(weight)

    def set_hook(self, hook: Callable[[], None]) -> None:
        """Set DDP's hook, which adds `weight.grad` to `weight.main_grad` and marks the weight as ready."""
        self._hook, weight = hook, self._weight()
        if weight is None:
            return
        node = get_gradient_edge(weight).node
        if node is self._accumulation:
            return  # several layers share the weight
        # If B and W are fused, autograd adds up the gradient and calls this hook once per backward, however often the
        # weight is used. As in DDP, the hook belongs to the node that accumulates the gradient, so that the user's
        # hooks of the weight run before. The reference is weak because Python's garbage collector does not look into
        # such hooks: a strong reference would keep the model, its optimizer and its process groups in memory.
        this = weakref.ref(self)

        def reduce(*gradients: Any) -> None:
            if (split_weight := this()) is not None and (weight := split_weight._weight()) is not None:
                split_weight._reduce(weight)

        self._accumulation = node
        node.register_hook(reduce)

    def accumulate(self, grad: torch.Tensor, into: MicrobatchSum, weight: torch.Tensor) -> None:
        """Add the term `grad` to the sum `into`; if the sum is complete, add it to `weight.grad` and call DDP's hook.

        Args:
            weight: the weight that the forward used: the layer's parameter, or a gathered copy of the parameter.
        """
        total = into.add(grad, weight)
        if total is None:
            return
        assert self._hook is None or weight.grad is None, "a weight's gradient was computed twice"
        # From torch 2.15 on, FSDP2 sets the type in which a gathered weight sums its gradients.
        total = total.to(getattr(weight, "grad_dtype", None) or total.dtype)
        if weight.grad is None:
            weight.grad = total
        elif not is_in_main_grad(weight):
            weight.grad += total  # in place, as autograd adds, because the gradient may be a view of a buffer
        self._reduce(weight)

    def _reduce(self, weight: torch.Tensor) -> None:
        # Autograd also calls this function after a B, which computes a gradient only if other operations use the
        # weight, too.
        if self._hook is None or weight.grad is None:
            return
        if (sum_of_w := self.sums.of_running_b()) is not None:
            sum_of_w.begin_with(weight.grad)
            weight.grad = None
        else:
            self._hook()


class MicrobatchSum:
    """Sums the terms of one microbatch's weight gradient: one term for each time that the forward uses the layer.

    Multi-token prediction calls the output layer several times in a forward. The terms of a weight gradient are added
    in the order in which B visits the calls of the layer; autograd adds the terms in the same order.
    """

    def __init__(self) -> None:
        self.num_missing = 0
        self._total: torch.Tensor | None = None

    def begin_with(self, grad: torch.Tensor) -> None:
        """Begin with the gradient from other uses of the weight, which B computes; call it before any W."""
        assert self._total is None, "called before the first W"
        self._total = grad

    def add(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Add a term of the weight gradient; return the sum if this term is the last one, otherwise None.

        Args:
            grad: the term, or a placeholder if a kernel has added the term to `main_grad` of `weight`.
        """
        self.num_missing -= 1
        total = grad if self._total is None or is_in_main_grad(weight) else self._total + grad
        # A complete sum is not kept, because it is as large as the weight.
        self._total = total if self.num_missing else None
        return total if self.num_missing == 0 else None


class MicrobatchSums:
    """Provides the `MicrobatchSum` of the microbatch whose B runs."""

    def __init__(self, store: WeightGradStore) -> None:
        self._store = store
        self._current = MicrobatchSum()
        self._of_microbatch = -1

    def expect(self) -> MicrobatchSum:
        """Return the current microbatch's sum; each call adds one to the number of terms that this sum expects."""
        if self._of_microbatch != self._store.num_flushed:
            self._of_microbatch, self._current = self._store.num_flushed, MicrobatchSum()
        self._current.num_missing += 1
        return self._current

    def of_running_b(self) -> MicrobatchSum | None:
        """Return the sum for which the running B has deferred terms that W has not added; None if there are none."""
        is_waiting = self._of_microbatch == self._store.num_flushed and self._current.num_missing > 0
        return self._current if is_waiting else None


@dataclass(eq=False)
class DeferredWeightGrad:
    """The W that belongs to one call of a layer in a microbatch's forward.

    With sequence parallelism, W gathers the whole input again over `gather_group`, while the previous W computes. The
    forward keeps only this rank's slice of the input, and megatron-core's buffer for the gathered input is overwritten
    before W.
    """

    split_weight: SplitWeight
    weight: torch.Tensor
    kept_input: torch.Tensor
    grad_output: torch.Tensor
    is_fused: bool
    gather_group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        self._sum = self.split_weight.sums.expect()
        self._versions = self._versions_now()
        self._gathering: tuple[torch.Tensor, Any] | None = None

    def start_to_gather(self) -> None:
        if self.gather_group is None:
            return
        kept = self.kept_input.contiguous()
        whole = kept.new_empty((kept.shape[0] * self.gather_group.size(), *kept.shape[1:]))
        self._gathering = whole, dist.all_gather_into_tensor(whole, kept, group=self.gather_group, async_op=True)

    def _versions_now(self) -> tuple[int, int]:
        return self.kept_input._version, self.grad_output._version

    def run(self) -> None:
        """Compute the weight gradient.

        Raises:
            ForwardStepError: the model has changed the layer's input or the output's gradient in place after B.
        """
        if self._versions != self._versions_now():
            raise ForwardStepError(
                f"{self.split_weight.name} (split into B and W): its input or its output's gradient is changed in "
                "place between B and W: change a copy of the tensor"
            )
        grad_output, whole_input = prepare_input_tensors_for_wgrad_compute(self.grad_output, self._whole_input())
        if self.is_fused:
            grad = add_to_main_grad(self.weight, whole_input, grad_output)
        else:
            grad = grad_output.t().matmul(whole_input)
        self.split_weight.accumulate(grad, self._sum, self.weight)

    def _whole_input(self) -> torch.Tensor:
        if self._gathering is None:
            return self.kept_input
        whole, gathering = self._gathering
        gathering.wait()
        return whole


def add_to_main_grad(weight: Any, total_input: torch.Tensor, grad_output: torch.Tensor) -> torch.Tensor:
    """Add the weight gradient to `main_grad` in one pass, by apex's kernel; return a placeholder for the gradient."""
    import fused_weight_gradient_mlp_cuda as apex

    wide = weight.main_grad.dtype == torch.float32
    add = apex.wgrad_gemm_accum_fp32 if wide else apex.wgrad_gemm_accum_fp16
    add(total_input, grad_output, weight.main_grad)
    weight.grad_added_to_main_grad = True
    return placeholder_gradient(weight)


def placeholder_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Return a placeholder for a gradient that is in `main_grad`: zeros in the shape of `weight`, stored as one number.

    DDP's hook expects a gradient, and adds this gradient to `main_grad` if `zero_out_wgrad` is set.
    """
    return weight.detach().new_zeros(1).expand_as(weight)


OWN = "is_zero_bubbles"
"""Name of an attribute of the hooks that this project registers with parameters."""


def has_hooks(parameter: Any) -> bool:
    """Tell whether the user has registered gradient hooks with a parameter; user hooks expect the whole gradient in
    B."""
    after = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or not all(hasattr(hook, OWN) for hook in after)


def is_in_main_grad(parameter: Any) -> bool:
    """Tell whether a kernel adds this weight's gradient directly to `main_grad` (`gradient_accumulation_fusion`)."""
    return getattr(parameter, "grad_added_to_main_grad", False)
