"""Sets `delay_wgrad_compute` in the configurations of a script's models while the models are built."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.mcore.transformer_engine import compute_in_backward, defer_weight_gradients

_FIELD = "delay_wgrad_compute"


class ConfigDeferral:
    """Lets Transformer Engine's modules of a script's models defer W, although no user sets `delay_wgrad_compute`.

    A script may save the configuration of its model, and megatron-core refuses a configuration with the setting. The
    setting is therefore switched off when DDP has wrapped a model, or when the script asks for the function that runs
    steps.
    """

    def __init__(self) -> None:
        self._switched_on: list[Any] = []
        """The configurations in which the setting is switched on."""
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        """The modules that were built while the setting was on, until the setting is switched off."""

    def begin_module(self, call: Call) -> None:
        """When the constructor of `MegatronModule` is called, switch the setting on in the module's configuration."""
        config = call["config"]
        if not getattr(config, _FIELD, True):
            self._switched_on.append(config)
            defer_weight_gradients(config)
        call.proceed()
        if self._switched_on:
            self._modules.append(weakref.ref(call["self"]))

    def end(self) -> None:
        """Switch the setting off in all configurations in which `begin_module` has switched it on.

        Modules that were built in the meantime, and put no W into a store, compute W in their backward: a loop may
        train another model, without a schedule.
        """
        while self._switched_on:
            setattr(self._switched_on.pop(), _FIELD, False)
        compute_in_backward(module for reference in self._modules if (module := reference()) is not None)
        self._modules.clear()

    def ended_after(self, handle: Callable[[Call], Any]) -> Callable[[Call], Any]:
        """Return a function that passes a call to `handle`, and then switches the setting off."""

        def handle_and_end(call: Call) -> Any:
            try:
                return handle(call)
            finally:
                self.end()

        return handle_and_end

    @contextmanager
    def switched_off_in_copy(self, config: Any) -> Iterator[None]:
        """Switch the setting off in the `with` block, which checks a new configuration, if the setting is not a user's.

        The layers of a heterogeneous model have configurations that are copied from the model's configuration.
        """
        if not (self._switched_on and getattr(config, _FIELD)):
            yield
            return
        with replaced(config, _FIELD, False):
            yield
