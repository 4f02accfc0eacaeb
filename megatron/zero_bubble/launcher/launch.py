"""`enable` gives the training loop of this process a zero-bubble schedule; `disable` removes the schedule again."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch

from megatron.zero_bubble.launcher.command_line import LaunchFlags, flags_from_keywords
from megatron.zero_bubble.launcher.hooks import Hook, InstalledHooks, find_target, minor_version
from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.session.start_up import SessionError

if TYPE_CHECKING:
    from megatron.zero_bubble.launcher.hook_table import ScriptHooks

SUPPORTED = ("0.16", "0.17", "0.18", "0.19", "0.20")
"""Versions of megatron-core that the hooks are tested with; docs/megatron_versions.md names the exact releases."""


class Launch:
    """Installs the launcher's hooks until `close()` is called; with `--zero-bubble-cpu`, also replaces CUDA functions.

    Args:
        flags: the launcher's flags; if the flags ask for no schedule, no hook of a schedule is installed.

    Raises:
        SessionError: megatron-core is missing or not supported; a hooked function is missing or lacks a parameter; or a
            schedule needs a CUDA device, and torch finds none.
    """

    enabled: ClassVar[Launch | None] = None
    """The launch whose schedule is enabled in this process; None if no schedule is enabled."""

    def __init__(self, flags: LaunchFlags) -> None:
        self.script_hooks: ScriptHooks | None = None
        with ExitStack() as resources:
            self._open(flags, resources)
            self._resources = resources.pop_all()

    def _open(self, flags: LaunchFlags, resources: ExitStack) -> None:
        if find_spec("megatron.core") is None:
            raise SessionError("megatron.core is found neither beside the script nor installed")
        cpu = substitute_cuda() if flags.zero_bubble_cpu else None
        if cpu is not None:
            resources.callback(cpu.restore)
        version = supported_version()
        if flags.asks_for_schedule and cpu is None and not torch.cuda.is_available():
            raise SessionError(
                "torch finds no CUDA device on this machine: --zero-bubble-cpu, or enable(cpu=True), trains on CPUs"
            )
        has_trainer, missing = find_spec("megatron.training") is not None, None
        if has_trainer:
            # A loop of its own may run without the packages that Megatron-LM's trainer imports.
            try:
                importlib.import_module("megatron.training.training")
            except ImportError as error:
                has_trainer, missing = False, error
        # Imported after the CPU substitutions, because importing megatron-core looks for a device and compiles code.
        from megatron.zero_bubble.launcher.cpu_hooks import cpu_hooks
        from megatron.zero_bubble.launcher.hook_table import ScriptHooks

        runs_on_cpu = cpu is not None and not torch.cuda.is_available()
        hooks: list[Hook] = [*cpu_hooks(resources.enter_context(ExitStack()))] if runs_on_cpu else []
        if flags.asks_for_schedule:
            self.script_hooks = ScriptHooks(flags, missing)
            hooks += self.script_hooks.hooks()
            for needed in self.script_hooks.needed():
                if needed.applies_to(version, has_trainer=has_trainer):
                    find_target(needed, version)
        hooks = [hook for hook in hooks if hook.applies_to(version, has_trainer=has_trainer)]
        resources.callback(InstalledHooks(hooks, version).restore)
        if self.script_hooks is not None:
            resources.callback(self.script_hooks.close)
            Launch.enabled = self

    def close(self) -> None:
        """Restore all functions that the launcher has replaced. A second call of `close` does nothing."""
        if Launch.enabled is self:
            Launch.enabled = None
        self._resources.close()


def supported_version() -> str:
    """Return the version of the imported megatron-core.

    Raises:
        SessionError: the version is not one of `SUPPORTED`.
    """
    core = importlib.import_module("megatron.core")
    if minor_version(core.__version__) not in SUPPORTED:
        raise SessionError(
            f"megatron-core {core.__version__} of {core.__path__[0]} is not supported: "
            f"supported versions begin with {', '.join(SUPPORTED)}"
        )
    return core.__version__


def enable(schedule: str | None = None, *, cpu: bool = False, **settings: object) -> None:
    """Let the training loop of this process run under a zero-bubble schedule.

    Every rank must call `enable` before Megatron-LM's `pretrain` or, without `pretrain`, before the model is built.

    Args:
        schedule: name of the schedule, as for `--zero-bubble-schedule`; None to plan a schedule, as with
            `--zero-bubble`.
        cpu: whether to run on a machine without CUDA, like `--zero-bubble-cpu`.
        settings: values of other flags by name, such as `memory_limit="1.5"` for `--zero-bubble-memory-limit 1.5`.

    Raises:
        ValueError: zero bubble is enabled already, or a flag or megatron-core's version is not supported.
    """
    if Launch.enabled is not None:
        raise SessionError("zero bubble is enabled already: call disable() first")
    Launch(flags_from_keywords(schedule, cpu, settings))


def disable() -> None:
    """Undo `enable()`; without an enabled schedule, `disable` does nothing."""
    if Launch.enabled is not None:
        Launch.enabled.close()
