"""`disable()` leaves megatron-core, and the objects of a script, as they were before `enable()`."""

from __future__ import annotations

from unittest import mock

import pytest
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import MegatronModule, TransformerConfig

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.hook_table import ScriptHooks
from megatron.zero_bubble.launcher.launch import disable, enable
from megatron.zero_bubble.session.start_up import SessionError


def test_zero_bubble_is_enabled_once_at_a_time() -> None:
    original = schedules.get_forward_backward_func
    enable("zb-h1", cpu=True)
    try:
        assert schedules.get_forward_backward_func is not original
        with pytest.raises(SessionError, match=r"^zero bubble is enabled already: call disable\(\) first$"):
            enable("zb-h2", cpu=True)
    finally:
        disable()
    disable()
    assert schedules.get_forward_backward_func is original
    enable("zb-h1", cpu=True)
    disable()


def test_disable_restores_the_configuration_of_a_model() -> None:
    """Transformer Engine's modules would be built to defer weight gradients that nothing computes."""
    enable("zb-h1", cpu=True)
    try:
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        MegatronModule(config)
        assert config.delay_wgrad_compute
    finally:
        disable()
    assert not config.delay_wgrad_compute


def test_sessions_end_in_reverse_order_also_after_an_error() -> None:
    """Two sessions replace the same functions of megatron-core."""
    hooks, sessions = ScriptHooks(LaunchFlags()), mock.Mock()
    sessions.second.close.side_effect = OSError("not closed")
    hooks._run = mock.Mock(sessions=[sessions.first, sessions.second])
    with pytest.raises(OSError, match="not closed"):
        hooks.close()
    assert sessions.mock_calls == [mock.call.second.close(), mock.call.first.close()]
