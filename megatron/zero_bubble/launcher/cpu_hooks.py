"""The hooks that Megatron-LM's trainer needs on a machine without CUDA."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron.zero_bubble.launcher.hooks import Call, Hook
from megatron.zero_bubble.launcher.script_checkpoint import writes_in_threads
from megatron.zero_bubble.mcore.checkpoint_writing import results_in_a_fork
from megatron.zero_bubble.mcore.replaced import replaced


def cpu_hooks(changes: ExitStack) -> Iterator[Hook]:
    """Yield the hooks that Megatron-LM's trainer needs on a machine without CUDA, in addition to `mcore/cpu.py`.

    Args:
        changes: stack to which a hook adds its changes; closing the stack undoes the changes.
    """
    from megatron.core import datasets

    def allow_no_cuda(call: Call) -> Any:
        from megatron.training.global_vars import get_args

        def start_no_worker(*arguments: object, **settings: object) -> None:
            get_args().use_persistent_ckpt_worker = False

        call["allow_no_cuda"] = True
        # A process that megatron-core starts, for saves or at the first save, imports megatron-core without the CPU
        # substitutions.
        initialize = importlib.import_module("megatron.training.initialize")
        with replaced(initialize, "init_persistent_async_worker", start_no_worker):
            result = call.proceed()
        changes.enter_context(writes_in_threads(get_args()))
        if getattr(get_args(), "async_save", False):
            changes.enter_context(results_in_a_fork())
        return result

    yield Hook(
        "megatron.training.initialize:initialize_megatron(allow_no_cuda)",
        "allows Megatron-LM to start without CUDA, and keeps its checkpoint writers in the process",
        allow_no_cuda,
    )
    yield Hook(
        "megatron.training.utils:get_device_arch_version()",
        "returns the newest GPU architecture, for which Megatron-LM demands no special environment variable",
        lambda call: 10,
    )
    yield Hook(
        "megatron.core.datasets.utils:compile_helpers()",
        "does nothing without a Makefile: megatron-core's wheels contain the compiled helper and no Makefile",
        lambda call: call.proceed() if Path(datasets.__path__[0], "Makefile").exists() else None,
    )
    yield Hook(
        "megatron.legacy.fused_kernels:load()",
        "does nothing; the original function needs nvcc, the compiler of CUDA",
        lambda call: None,
        until="0.16",
    )
