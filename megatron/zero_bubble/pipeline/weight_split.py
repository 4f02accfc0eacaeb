"""Splits the backward of torch's own layers into B and W.

A split layer runs its own forward and records the autograd graph of this forward apart from the model's graph. B runs
the backward of the layer's graph for the gradient of the input only, and W runs the backward of the layer's graph for
the gradients of the parameters only. Autograd itself computes and accumulates the gradients in B and W. Therefore, the
gradients are bitwise equal to the gradients of an unsplit backward.

A module that implements `DefersWeightGradients` splits its backward into B and W itself.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.nn.modules import activation
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from megatron.zero_bubble.pipeline.called_modules import callable_modules, inside_sharded, is_patched
from megatron.zero_bubble.pipeline.graph_backward import NonLeaf, run_backward
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

SPLIT_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
)
"""Torch's layers whose forward uses the weight in a single operation. A subclass of a class in `SPLIT_LAYERS` is split,
too, if the subclass inherits the forward."""

_KEY_VALUE_BIASES = {"bias_k", "bias_v"}
"""Names of parameters of `nn.MultiheadAttention` that are appended to keys and values, and used by no projection."""

_OUTSIDE_IN_PROJECTION = _KEY_VALUE_BIASES | {"out_proj.weight", "out_proj.bias"}

_ATTENTION_PARAMETERS = _OUTSIDE_IN_PROJECTION | {
    *("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}


@runtime_checkable
class DefersWeightGradients(Protocol):
    """A module that splits its own backward, so that `split_modules` does not split the module's submodules."""

    def defer_weight_gradients(self, store: WeightGradStore) -> Iterable[nn.Parameter]:
        """Defer weight gradients from now on; return the parameters whose gradients are deferred.

        While `store.is_deferring` is true, a backward calls `store.put` with a function that computes weight gradients
        and adds the weight gradients to `.grad`. While `store.is_deferring` is false, a backward computes the weight
        gradients itself. Each call of `split_modules` calls this method once.
        """
        ...


def split_modules(
    modules: Iterable[nn.Module], store: WeightGradStore, others: Sequence[type[nn.Module]] = ()
) -> list[nn.Parameter]:
    """Split the backward of the layers inside one stage's `modules` into B and W.

    While `store.is_deferring` is true, B puts the computation of W into `store`. A layer that shares a parameter with
    another layer is not split, because B has to add up the parameter's gradients from both layers. A layer whose
    `forward` was replaced on the instance, for example by an adapter, is not split. A layer that an earlier call of
    `split_modules` has split is split again, for the `store` of the new call.

    Args:
        others: classes of layers that are split in addition to `SPLIT_LAYERS`. The forward of a class in `others` must
            take one tensor, return one tensor, and not keep the returned tensor. A layer of a class in `others` is
            split as a whole, and its submodules are not split.

    Returns:
        The parameters whose gradients are now computed in W.
    """
    every = nn.ModuleList(modules)
    unsplit(every.modules())
    sharded = inside_sharded(every)
    wholes = (DefersWeightGradients, nn.MultiheadAttention, *others)
    inside = list(callable_modules(every, wholes))
    uses = Counter(
        id(parameter) for module in inside for parameter in module.parameters(recurse=isinstance(module, wholes))
    )
    split: list[nn.Parameter] = []
    for module in inside:
        if isinstance(module, DefersWeightGradients):
            split += module.defer_weight_gradients(store)
        elif module in sharded or is_patched(module) or any(uses[id(own)] != 1 for own in module.parameters()):
            continue
        elif (forward := _split_forward(module, store, others)) is not None:
            module.forward = forward
            split += forward.parameters
    return split


def unsplit(modules: Iterable[nn.Module]) -> None:
    """Undo the split of `modules`, but not of their submodules."""
    for module in modules:
        if isinstance(vars(module).get("forward"), _SplitLayer | _SplitAttention):
            del module.forward


def _split_forward(
    module: nn.Module, store: WeightGradStore, others: Sequence[type[nn.Module]]
) -> _SplitLayer | _SplitAttention | None:
    """Return a replacement of a module's forward that splits the backward into B and W; None if this is impossible."""
    # If a weight is computed from other parameters, as by weight_norm, the module has parameters of other names.
    own = {name for name, _ in module.named_parameters()}
    if _has_forward_of(nn.MultiheadAttention, module) and own <= _ATTENTION_PARAMETERS:
        return _SplitAttention(cast(nn.MultiheadAttention, module), store)
    is_split_layer = "weight" in own and any(_has_forward_of(kind, module) for kind in SPLIT_LAYERS)
    return _SplitLayer(module, store) if is_split_layer or isinstance(module, tuple(others)) else None


def _has_forward_of(kind: type[nn.Module], module: nn.Module) -> bool:
    return isinstance(module, kind) and type(module).forward is kind.forward


class _SplitLayer:
    """Replaces the forward of a module, and splits the module's backward into B and W.

    Args:
        unsplit: names of parameters whose gradients are computed in B.
    """

    def __init__(self, module: nn.Module, store: WeightGradStore, unsplit: Collection[str] = ()) -> None:
        self._forward = module.forward
        self.module, self.store, self._unsplit = module, store, unsplit
        self._calls: list[tuple[GradientEdge, torch.Tensor]] = []
        self._of_bundle = -1
        self._is_split = True

    def __call__(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if not keywords and len(arguments) == 1 and isinstance(arguments[0], torch.Tensor):
            return self.call(self._forward, arguments[0])
        leaves, structure = pytree.tree_flatten((arguments, keywords))
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if len(tensors) != 1:
            raise ValueError(
                f"split_layers={type(self.module).__name__} cannot be split: its forward takes {len(tensors)} "
                "tensors, not one; leave it out of split_layers"
            )

        def forward(input: torch.Tensor) -> torch.Tensor:
            leaves[tensors[0]] = input
            positional, named = pytree.tree_unflatten(leaves, structure)
            return self._forward(*positional, **named)

        return self.call(forward, leaves[tensors[0]])

    def call(self, function: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor) -> torch.Tensor:
        """Return `function(input)`; if possible, the gradients of the layer's parameters are computed in W."""
        parameters = self.parameters
        if not parameters or not torch.is_grad_enabled() or not self._can_defer(parameters):
            return function(input)
        return _SplitCall.apply(self, function, input, *parameters)

    def _can_defer(self, parameters: Sequence[nn.Parameter]) -> bool:
        # A parameter's hook expects the whole gradient in the backward.
        has_hooks = any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters)
        # `torch.func.functional_call` replaces parameters, perhaps by tensors that are no leaves of the graph.
        are_leaves = all(each.is_leaf for each in parameters)
        is_plain = are_leaves and not has_hooks and not torch._C._are_functorch_transforms_active()
        return self._is_split and is_plain and not _is_checkpointed_by_torch()

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose gradients are computed in W."""
        named = self.module.named_parameters()
        return tuple(each for name, each in named if each.requires_grad and name not in self._unsplit)

    def differentiate(
        self, function: Callable[[torch.Tensor], torch.Tensor], tensors: Sequence[torch.Tensor], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of a layer's input and parameters for a backward with `create_graph=True`.

        The backward of later calls of the layer is not split, because a single backward must compute all gradients if
        a loss depends on gradients.
        """
        self._is_split = False
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        grads = torch.autograd.grad(function(tensors[0]), inputs, grad, create_graph=True, allow_unused=True)
        return (None,) * (len(tensors) - len(inputs)) + grads

    def defer(self, parameters: tuple[nn.Parameter, ...], edge: GradientEdge, grad: torch.Tensor) -> None:
        """Defer the weight gradient of one call of the layer; one W computes the weight gradients of all calls."""
        if self._of_bundle != self.store.num_flushed:
            self._of_bundle, self._calls = self.store.num_flushed, []
            weight_grad = partial(_run_weight_backward, self._calls, parameters)
            self.store.put(weight_grad, held=(grad,), parameter=self.module)
        self._calls.append((edge, grad))


class _SplitAttention:
    """Replaces the forward of an `nn.MultiheadAttention`, and splits the backward of its two projections.

    Torch's functions for attention call `linear` with the weights of a projection. `_forward` runs copies of torch's
    functions, in which a split layer replaces `linear`. Torch's own functions stay unchanged for other modules.
    """

    def __init__(self, module: nn.MultiheadAttention, store: WeightGradStore) -> None:
        self._in_projection = _SplitLayer(module, store, unsplit=_OUTSIDE_IN_PROJECTION)
        self._out_projection, self._module = _SplitLayer(module.out_proj, store), module
        functions = {**vars(functional), "linear": self._linear}
        for name in ("_in_projection", "_in_projection_packed", "multi_head_attention_forward"):
            functions[name] = _with_globals(functions[name], functions)
        forward = _with_globals(type(module).forward, {**vars(activation), "F": SimpleNamespace(**functions)})
        self._forward = forward.__get__(module)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._forward(*arguments, **keywords)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose gradients are computed in W."""
        return self._in_projection.parameters + self._out_projection.parameters

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        layer = self._out_projection if weight is self._module.out_proj.weight else self._in_projection
        return layer.call(lambda x: functional.linear(x, weight, bias), input)


def _with_globals(function: Any, names: dict[str, Any]) -> Any:
    """Copy a Python function; the copy looks up global names in `names`."""
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _is_checkpointed_by_torch() -> bool:
    """Whether the running forward is inside `torch.utils.checkpoint` with `use_reentrant=False`; if so, warn.

    `torch.utils.checkpoint` repeats the forward in every backward that reads a saved tensor, so that B and W of a
    split layer would each repeat the forward. The warning says that W stays in B.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if not hooks or getattr(hooks[0], "__module__", None) != checkpoint.__module__:
        return False
    warnings.warn(
        "W stays in B inside torch.utils.checkpoint(use_reentrant=False): give checkpoint=True to LayerSpec or "
        "PipelineOptions instead",
        stacklevel=2,
    )
    return True


def _run_weight_backward(calls: list[tuple[GradientEdge, torch.Tensor]], parameters: Sequence[nn.Parameter]) -> None:
    """Compute a layer's weight gradients; `calls` has a pair (graph edge, output gradient) for each forward call."""
    edges, grads = zip(*calls, strict=True)
    calls.clear()
    run_backward(edges, grads, parameters, accumulates=True)


class _SplitCall(torch.autograd.Function):
    """Autograd function of one call of a split layer."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: _SplitLayer,
        function: Callable[[torch.Tensor], torch.Tensor],
        input: torch.Tensor,
        *parameters: nn.Parameter,
    ) -> torch.Tensor:
        needs_gradient = ctx.needs_input_grad[2]
        own_input = input.detach().requires_grad_(needs_gradient)
        with torch.enable_grad():
            if needs_gradient and torch._C._autograd._top_saved_tensors_default_hooks(False):
                own_input = NonLeaf.apply(torch.empty(0, requires_grad=True), [input])
            output = function(own_input)
        if not isinstance(output, torch.Tensor):
            raise ValueError(
                f"split_layers={type(layer.module).__name__} cannot be split: its forward returns a "
                f"{type(output).__name__}, not one tensor; leave it out of split_layers"
            )
        ctx.layer, ctx.function, ctx.parameters = layer, function, parameters
        ctx.save_for_backward(input)
        ctx.input = get_gradient_edge(own_input) if needs_gradient else None
        ctx.edge = get_gradient_edge(output)
        # Not detached, so that the next layer may change the output in place: none of these layers keeps its output.
        return output.data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer, parameters, edge = ctx.layer, ctx.parameters, ctx.edge
        if torch.is_grad_enabled():
            return None, None, *layer.differentiate(ctx.function, (*ctx.saved_tensors, *parameters), grad)
        inputs = () if ctx.input is None else (ctx.input,)
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keeps_graph:
            # Freed at once, as autograd frees saved tensors, so that the next layer can use the memory.
            del ctx.edge, ctx.input, ctx.function
        if layer.store.defers(parameters[0]):
            grads = run_backward((edge,), (grad,), inputs, keeps_graph=True) if inputs else (None,)
            layer.defer(parameters, edge, grad.detach())
            return None, None, grads[0], *(None,) * len(parameters)
        grads = run_backward((edge,), (grad,), (*inputs, *parameters), keeps_graph=keeps_graph)
        return None, None, *(() if inputs else (None,)), *grads
