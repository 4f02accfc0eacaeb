"""Layers of a pipeline: modules, functions, or `LayerSpec`s; only the rank that holds a layer builds the layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron.zero_bubble.schedule.errors import one_line


class LayerSpec:
    """A layer that is built as `layer_class(*args, **kwargs)`; only the rank that holds the layer builds it.

    The random seed of a layer's initial weights is computed from `torch.initial_seed()` and the layer's index, so that
    the weights do not depend on the partition.

    Args:
        layer_class: a subclass of `torch.nn.Module`, or a function that returns a module.
        checkpoint: whether the layer drops its activations in F and repeats its forward in R, before B.

    Raises:
        ValueError: `layer_class` is neither a class nor a function, or does not accept `args` and `kwargs`.
    """

    def __init__(
        self, layer_class: Callable[..., torch.nn.Module], *args: Any, checkpoint: bool = False, **kwargs: Any
    ) -> None:
        if not callable(layer_class) or isinstance(layer_class, torch.nn.Module):
            raise ValueError(f"LayerSpec takes a class and its arguments, got {type(layer_class).__name__}")
        self.layer_class, self.args, self.kwargs, self.checkpoint = layer_class, args, kwargs, checkpoint

        try:
            signature = inspect.signature(layer_class)
        except (TypeError, ValueError):  # the arguments of the callable are not known
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"LayerSpec({self.class_name}, ...): {error}") from None

    @property
    def class_name(self) -> str:
        return getattr(self.layer_class, "__name__", type(self.layer_class).__name__)

    def build(self) -> torch.nn.Module:
        return self.layer_class(*self.args, **self.kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with all layers of the same `key`, including layers on other stages.

    Each stage with layers of the same `key` holds one copy of the parameters. At the end of a step, the gradients of
    all copies of a parameter are summed in the order of the stages, and every copy gets the sum, so that copies with
    equal weights stay equal.

    Args:
        forward: function that runs the layer as `forward(module, input)` in place of `module(input)`. For example, an
            output layer can multiply its input by the weight of the embedding.

    Raises:
        ValueError: `key` is not a string, or `LayerSpec` refuses the other arguments.
    """

    def __init__(
        self,
        key: str,
        layer_class: Callable[..., torch.nn.Module],
        *args: Any,
        forward: Callable[[torch.nn.Module, Any], Any] | None = None,
        checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(key, str):
            raise ValueError(f"the key of a TiedLayerSpec must be a string, got {key!r}")
        super().__init__(layer_class, *args, checkpoint=checkpoint, **kwargs)
        self.key, self.forward = key, forward


class FunctionLayer(torch.nn.Module):
    """A layer that calls a function and has no parameters."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Any) -> Any:
        return self.function(input)


def class_name_of(layer: Any) -> str:
    """Return the name that `partition="type:REGEX"` matches: the name of a layer's class, or of a plain function."""
    if isinstance(layer, LayerSpec):
        return layer.class_name
    return type(layer).__name__ if isinstance(layer, torch.nn.Module) else getattr(layer, "__name__", "function")


def words_of(module: torch.nn.Module) -> str:
    """Return a text with the name of a module's class and the shapes of the module's parameters."""
    shapes = ", ".join("x".join(map(str, parameter.shape)) for parameter in module.parameters())
    return f"{class_name_of(module)}({shapes})"


_GRADIENT_REDUCERS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Names of classes that sum gradients over ranks, and expect a forward before each backward."""


def refuse_unusable(index: int, layer: Any) -> None:
    """Check that a pipeline can train layer `index`, if the layer is a module already.

    Raises:
        ValueError: the layer is a lazy module, such as `nn.LazyLinear`, whose shapes are not known yet; or a module
            inside the layer sums gradients over ranks, which would miss the gradients of most microbatches.
    """
    if not isinstance(layer, torch.nn.Module):
        return
    # By name, because importing `torch.distributed.fsdp` takes time.
    kinds = {kind.__name__ for module in layer.modules() for kind in type(module).__mro__}
    for name in sorted(kinds & _GRADIENT_REDUCERS):
        raise ValueError(
            f"layer {index} ({class_name_of(layer)}) uses {name}, which needs a forward before each backward: give "
            "replicas=... to Pipeline, or use fully_shard"
        )
    if any(torch.nn.parameter.is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
        raise ValueError(
            f"layer {index} ({class_name_of(layer)}) has no shapes yet: call the module once before you give it to the "
            "pipeline, or use a class that takes all sizes"
        )


def tie_of(layer: Any) -> str | None:
    """Return the key of a tied layer; None for any other layer."""
    return layer.key if isinstance(layer, TiedLayerSpec) else None


def built_on_meta(spec: LayerSpec) -> torch.nn.Module:
    """Build a layer on the meta device: the parameters take no memory, and the random state does not change."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return spec.build()


def module_of(layers: Sequence[Any], index: int, device: torch.device) -> torch.nn.Module:
    """Return the module of layer `index` on its present device; a layer that is built from a spec is on `device`.

    A layer built from a spec has the same weights on every rank.

    Raises:
        ValueError: the layer is not a module, a function or a `LayerSpec`, cannot be built from its `LayerSpec`, or is
            refused by `refuse_unusable`.
    """
    layer = layers[index]
    if isinstance(layer, LayerSpec):
        # All copies of a tied layer start from one seed.
        first = next(k for k, other in enumerate(layers) if k == index or tie_of(other) == tie_of(layer) is not None)
        with seeded(first, device), device:
            try:
                layer = layer.build()
            except Exception as error:
                raise ValueError(
                    f"layer {index} ({class_name_of(layers[index])}) cannot be built: {one_line(error)}"
                ) from error
    if not isinstance(layer, torch.nn.Module):
        if isinstance(layer, type) and issubclass(layer, torch.nn.Module):
            name = layer.__name__
            raise ValueError(f"layer {index} is the class {name}: give {name}(...) or LayerSpec({name}, ...)")
        if not callable(layer):
            raise ValueError(f"layer {index} is neither a module, a LayerSpec nor a function, but {layer!r}")
        layer = FunctionLayer(layer)
    refuse_unusable(index, layer)
    return layer


def call_of(layer: Any, module: torch.nn.Module) -> Callable[[Any], Any]:
    """Return the function that runs a built layer: the module itself, or the `forward` of a tied layer's spec."""
    if isinstance(layer, TiedLayerSpec) and layer.forward is not None:
        return partial(layer.forward, module)
    return module


@contextmanager
def seeded(layer: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators for layer `layer` in the `with` block, and restore the random states afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(torch.initial_seed() + layer)
        yield
