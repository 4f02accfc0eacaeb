"""A model's configuration asks Transformer Engine's modules to defer W only while the model is built."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.zero_bubble.launcher.config_deferral import ConfigDeferral
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.mcore.transformer_engine import put_into_store
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore


def build_module(deferral: ConfigDeferral, config: TransformerConfig) -> list[bool]:
    """Call the hook of the constructor of `MegatronModule`; return the setting that the constructor found."""
    seen: list[bool] = []

    class Module(MegatronModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            seen.append(config.delay_wgrad_compute)

    construct = Module.__init__
    deferral.begin_module(Call(construct, inspect.signature(construct).bind(object.__new__(Module), config)))
    return seen


def new_config() -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


def test_the_setting_is_on_while_a_model_is_built_and_wrapped() -> None:
    """Megatron-Bridge saves the configuration, and megatron-core would refuse what it loads."""
    config, deferral = new_config(), ConfigDeferral()
    for _ in range(2):  # the second model has the configuration of the first
        assert build_module(deferral, config) == [True]
        assert build_module(deferral, config) == [True]
        deferral.end()
        assert not config.delay_wgrad_compute
        config.__post_init__()


def test_megatron_core_checks_a_copy_without_the_setting_which_the_copy_keeps() -> None:
    """A heterogeneous model copies the configuration for each layer while it is built."""
    config, deferral = new_config(), ConfigDeferral()
    build_module(deferral, config)
    of_layer = copy.copy(config)
    with deferral.switched_off_in_copy(of_layer):
        of_layer.__post_init__()
    assert of_layer.delay_wgrad_compute


def test_a_setting_of_the_user_is_checked_and_stays() -> None:
    config, deferral = new_config(), ConfigDeferral()
    config.delay_wgrad_compute = True
    with deferral.switched_off_in_copy(config), pytest.raises(AssertionError, match="delay_wgrad_compute"):
        config.__post_init__()
    assert build_module(deferral, config) == [True]
    deferral.end()
    assert config.delay_wgrad_compute


class Deferring(torch.nn.Linear):
    """Has the attributes of Transformer Engine's modules that defer W."""

    use_bias = False

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.weight.skip_backward_post_hook = True
        self.wgrad_store = SimpleNamespace(enabled=True)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None: ...
    def backward_dw(self) -> None: ...


def test_modules_that_no_schedule_trains_compute_w_in_their_backward() -> None:
    """As of another model of the loop, whose own backward would queue W, and whose W nobody would run."""
    trained, other = (torch.nn.Sequential(Deferring()) for _ in range(2))
    config, deferral = new_config(), ConfigDeferral()
    for model in (trained, other):
        bound = inspect.signature(lambda self, config: None).bind(model, config)
        deferral.begin_module(Call(lambda self, config: None, bound))
    put_into_store(trained[0], WeightGradStore())
    deferral.end()
    assert (trained[0].wgrad_store.enabled, other[0].wgrad_store.enabled) == (True, False)
    put_into_store(other[0], WeightGradStore())
    assert other[0].wgrad_store.enabled, "a later split switches it on"
