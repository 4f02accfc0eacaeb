"""Lets megatron-core run on a machine without CUDA.

megatron-core allocates tensors on `torch.cuda.current_device()`, forks CUDA's random state, and compares types with
`torch.cuda.FloatTensor`. `substitute_cuda()` replaces megatron-core's uses of CUDA by functions for the CPU, until
`CpuSubstitution.restore()` is called. `substitutions()` lists every replaced attribute and the reason for the
replacement. On a machine with CUDA, `substitute_cuda()` changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megatron.zero_bubble.mcore.replaced import set_attribute

FACTORIES = ("arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "tensor", "triu", "zeros")
_TENSOR_TYPES = ("Float", "Half", "BFloat16", "Double", "Int", "Long", "Byte", "Bool")


class Substitution(NamedTuple):
    """The replacement of the attribute `name` of `owner`, and the reason for the replacement."""

    owner: Any
    name: str
    replacement: Any
    reason: str


def refuse_on_cpu(settings: Any) -> None:
    """Raise `ValueError` if a setting, an attribute of `settings`, does not work on a machine without CUDA."""
    if getattr(settings, "optimizer_cpu_offload", False):
        raise ValueError(
            "--optimizer-cpu-offload needs a GPU, because on a CPU the optimizer's states are on the host: leave it out"
        )


def substitutions() -> Iterator[Substitution]:
    """Yield all substitutions for a machine without CUDA, in the order in which they are applied."""
    for part in (_devices, _streams, _meshes, _random_state, _tensor_substitutions, _experts, _hybrid_models):
        yield from part()


ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""Environment variables that `substitute_cuda()` sets on a machine without CUDA, unless the user has set them.

megatron-core compiles some of its functions when it is imported. On a CPU, compiling takes minutes and gains
nothing."""


class CpuSubstitution:
    """Replaces attributes and sets environment variables, until `restore()` is called."""

    def __init__(self, environment: Mapping[str, str], applied: Iterable[Substitution]) -> None:
        with contextlib.ExitStack() as changes:
            for name in environment.keys() - os.environ.keys():
                os.environ[name] = environment[name]
                changes.callback(os.environ.pop, name, None)
            for owner, name, replacement, _ in list(applied):  # imports megatron-core, which reads the environment
                changes.callback(set_attribute(owner, name, replacement))
            self._changes = changes.pop_all()

    def restore(self) -> None:
        """Put the original attributes and environment variables back; only the first call has an effect."""
        self._changes.close()


def substitute_cuda() -> CpuSubstitution:
    """Apply the replacements of `substitutions()` if torch finds no CUDA device; otherwise replace nothing."""
    if torch.cuda.is_available():
        return CpuSubstitution({}, [])
    return CpuSubstitution(ENVIRONMENT, substitutions())


def _devices() -> Iterator[Substitution]:
    reason = "megatron-core allocates on the current CUDA device"
    yield Substitution(torch.cuda, "current_device", lambda: "cpu", reason)
    for name in FACTORIES:
        yield Substitution(torch, name, _on_cpu(getattr(torch, name)), 'megatron-core passes device="cuda"')
    reason = "Megatron-LM makes its process groups only where there is a device"
    yield Substitution(torch.cuda, "device_count", lambda: 1, reason)
    yield Substitution(torch.cuda, "synchronize", _no_op(), "timers and the optimizer wait for the device")
    yield Substitution(torch.cuda, "set_device", _no_op(), "the CPU is always the current device")
    reason = "Megatron-LM records the memory of the device, of which the CPU has none"
    yield Substitution(torch.cuda, "memory_stats", lambda *device: defaultdict(int), reason)
    for name in ("range_push", "range_pop"):
        yield Substitution(torch.cuda.nvtx, name, _no_op(), "profiler ranges need CUDA's library")


def _meshes() -> Iterator[Substitution]:
    from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp

    mesh = SimpleNamespace(from_group=lambda group, _: torch.distributed.DeviceMesh.from_group(group, "cpu"))
    yield Substitution(fsdp, "DeviceMesh", mesh, "megatron-core's wrapper of FSDP makes a mesh of CUDA devices")


def _streams() -> Iterator[Substitution]:
    reason = "collectives are put on side streams; on a CPU all work is in order"
    for name in ("Stream", "Event"):
        yield Substitution(torch.cuda, name, _CompleteWork, reason)
    yield Substitution(torch.cuda, "stream", lambda stream: contextlib.nullcontext(), reason)
    yield Substitution(torch.Tensor, "record_stream", _no_op(), reason)
    for name in ("current_stream", "default_stream"):
        yield Substitution(torch.cuda, name, lambda *device: _CompleteWork(), reason)


def _random_state() -> Iterator[Substitution]:
    from megatron.core.pipeline_parallel.utils import ScheduleNode
    from megatron.core.tensor_parallel import random

    applied = getattr(torch.cuda.get_rng_state, "__self__", None)
    # Nested substitutions share the generator.
    generator = applied if isinstance(applied, _DeviceGenerator) else _DeviceGenerator()
    reason = "the device has a generator of its own, with a state of its own"
    yield Substitution(torch.cuda, "get_rng_state", generator.get_state, reason)
    yield Substitution(torch.cuda.random, "get_rng_state", generator.get_state, reason)
    yield Substitution(torch.cuda, "set_rng_state", generator.set_state, reason)
    for name in ("manual_seed", "manual_seed_all"):
        yield Substitution(torch.cuda, name, generator.manual_seed, reason)
    yield Substitution(torch.cuda, "initial_seed", generator.initial_seed, reason)
    yield Substitution(random, "_set_cuda_rng_state", generator.set_state, reason)
    reason = "modules draw random numbers, such as dropout's, from the device's generator"
    yield Substitution(torch.nn.Module, "__call__", generator.drawn_from_in(torch.nn.Module.__call__), reason)
    reason = "nodes of a schedule plan draw outside of modules from the device's generator"
    yield Substitution(ScheduleNode, "forward", generator.drawn_from_in(ScheduleNode.forward), reason)
    tracker = random.CudaRNGStatesTracker
    reason = "draws in a fork of the device's random state, such as initial weights, use the device's generator"
    yield Substitution(tracker, "fork", generator.forked(tracker.fork), reason)
    warning = "CPU RNG state changed within GPU RNG context"
    reason = "the tracker warns of CPU draws in a CUDA fork, but here the CPU generator draws for the device, too"
    yield Substitution(
        logging.getLogger(random.__name__), "filter", lambda record: warning not in record.getMessage(), reason
    )


class _DeviceGenerator:
    """Emulates CUDA's random generator: for each draw, the CPU generator gets the emulated generator's state.

    The emulated generator has a state of its own, because data loaders also draw from the CPU generator. With a shared
    state, the draws of data loaders would change the dropout of a resumed run.
    """

    def __init__(self) -> None:
        self._state, self._seed = torch.Generator().get_state(), torch.Generator().initial_seed()
        self._is_in_place = False

    def get_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state() if self._is_in_place else self._state.clone()

    def set_state(self, state: torch.Tensor, *device: Any, **options: Any) -> None:
        if self._is_in_place:
            torch.set_rng_state(state)
        else:
            self._state = state.clone()

    def manual_seed(self, seed: int) -> None:
        self.set_state(torch.Generator().manual_seed(seed).get_state())
        self._seed = seed

    def initial_seed(self) -> int:
        return self._seed

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Give the CPU generator the emulated generator's state inside the `with` block."""
        of_the_cpu = torch.get_rng_state()
        torch.set_rng_state(self._state)
        self._is_in_place = True
        try:
            yield
        finally:
            self._is_in_place = False
            self._state = torch.get_rng_state()
            torch.set_rng_state(of_the_cpu)

    def drawn_from_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        generator = self

        # torch's profiler takes the variable `self` of this function for the module that is called.
        @functools.wraps(function)
        def draw(self: Any, *args: Any, **kwargs: Any) -> Any:
            if generator._is_in_place:
                return function(self, *args, **kwargs)
            with generator._in_place():
                return function(self, *args, **kwargs)

        return draw

    def forked(self, fork: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        @functools.wraps(fork)
        def draw_in_fork(*args: Any, **kwargs: Any) -> Iterator[None]:
            with fork(*args, **kwargs), contextlib.nullcontext() if self._is_in_place else self._in_place():
                yield

        return draw_in_fork


def _tensor_substitutions() -> Iterator[Substitution]:
    reason = "there is no CUDA device to move tensors to"
    yield Substitution(torch.Tensor, "cuda", lambda self, *args, **kwargs: self, reason)
    yield Substitution(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self, reason)
    for kind in _TENSOR_TYPES:
        cpu_type = getattr(torch, f"{kind}Tensor")
        yield Substitution(torch.cuda, f"{kind}Tensor", cpu_type, "the optimizer builds and compares CUDA tensor types")
    yield Substitution(torch.Tensor, "type", _cuda_named(torch.Tensor.type), "the optimizer compares type names")


def _experts() -> Iterator[Substitution]:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    reason = "an all-to-all takes numbers as sizes, and the original function converts only tensors on a GPU"
    yield Substitution(token_dispatcher, "maybe_move_tensor_to_cpu", _as_numbers, reason)
    if not hasattr(moe_utils, "te_general_gemm"):
        reason = "the router compares this name with None, but without Transformer Engine the name is undefined"
        yield Substitution(moe_utils, "te_general_gemm", None, reason)


def _hybrid_models() -> Iterator[Substitution]:
    from megatron.core.ssm import gated_delta_net, mamba_mixer
    from megatron.core.transformer import multi_token_prediction

    from megatron.zero_bubble.mcore import cpu_kernels
    from megatron.zero_bubble.mcore.decoder_models import STACK_MODULE
    from megatron.zero_bubble.mcore.layer_spec import LocalNorm

    if not find_spec("transformer_engine"):
        stack = importlib.import_module(STACK_MODULE)
        yield Substitution(stack, "TENorm", LocalNorm, "the norm after the last layer is Transformer Engine's")
        name = "is_inference_column_parallel_linear"
        if hasattr(multi_token_prediction, name):
            reason = "the function compares with a class that megatron-core has only with Transformer Engine"
            yield Substitution(multi_token_prediction, name, lambda layer: False, reason)
    if not mamba_mixer.HAVE_MAMBA_SSM:
        reason = "Mamba's kernels are written for CUDA"
        yield Substitution(mamba_mixer, "HAVE_MAMBA_SSM", True, reason)
        yield Substitution(mamba_mixer, "RMSNormGated", cpu_kernels.GatedRMSNorm, reason)
        yield Substitution(mamba_mixer, "ExtendedRMSNorm", cpu_kernels.GatedRMSNorm, reason)
        yield Substitution(mamba_mixer, "mamba_chunk_scan_combined", cpu_kernels.scan, reason)
        yield Substitution(mamba_mixer, "mamba_split_conv1d_scan_combined", cpu_kernels.convolve_and_scan, reason)
    if not gated_delta_net.HAVE_FLA:
        reason = "the kernels of gated delta nets are written for CUDA"
        rule = gated_delta_net.torch_chunk_gated_delta_rule
        for replacement in cpu_kernels.delta_net_kernels(gated_delta_net, rule):
            yield Substitution(*replacement, reason)


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _no_op() -> Callable[..., None]:
    """Return a new function that does nothing; dynamo refuses one function in the place of several."""
    return lambda *args, **kwargs: None


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        # With context parallelism megatron-core pins rotary positions, to copy them to the device.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return on_cpu


def _cuda_named(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method `Tensor.type`, so that it returns a CUDA type name, `torch.cuda.*Tensor`, for a CPU tensor."""

    def cuda_named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        return re.sub(r"^torch\.(?!cuda\.)", "torch.cuda.", answer) if isinstance(answer, str) else answer

    return cuda_named


class _CompleteWork:
    """Replaces a CUDA stream or a CUDA event on a CPU, where all launched work is already complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = wait_event = wait_stream = synchronize = __exit__ = _no_op()

    def __enter__(self) -> _CompleteWork:
        return self

    def record_event(self, *args: Any) -> _CompleteWork:
        return self

    def query(self) -> bool:
        return True
