"""The kinds of a script's layers, of which each is measured once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.launcher import script_units


def kinds(call: dict[str, Any]) -> list[int]:
    layers = script_units._layers(call)  # type: ignore[arg-type]
    distinct = script_units._distinct(layers)
    return [distinct.index(layer) for layer in layers]


def test_layers_differ_in_the_communication_of_context_parallel_ranks() -> None:
    given: dict[str, Any] = {"num_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "context_parallel_size": 2}
    words = ["p2p", "a2a", "p2p"]
    plain = {"transformer_layer_spec": SimpleNamespace()}
    assert kinds({**plain, "config": TransformerConfig(**given, cp_comm_type=words)}) == [0, 1, 0]
    assert kinds({**plain, "config": TransformerConfig(**given, cp_comm_type="a2a")}) == [0, 0, 0]


def test_layers_differ_in_their_specs_in_windows_and_in_rotary_embeddings() -> None:
    given: dict[str, Any] = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    plain = {"config": TransformerConfig(**given), "transformer_layer_spec": SimpleNamespace()}
    assert kinds(plain) == [0, 0, 0, 0]
    experts = SimpleNamespace(layer_specs=["dense", "experts", "experts", "dense"])
    assert kinds({**plain, "transformer_layer_spec": experts}) == [0, 1, 1, 0]
    windows = TransformerConfig(**given, window_size=(2, 0), window_attn_skip_freq=2)
    assert kinds({**plain, "config": windows}) == [0, 1, 0, 1]
    assert kinds({"config": windows, "transformer_layer_spec": experts}) == [0, 1, 2, 3]
    assert kinds({**plain, "config": TransformerConfig(**given, no_rope_freq=[0, 1, 1, 0])}) == [0, 1, 1, 0]
    assert kinds({**plain, "hybrid_layer_pattern": "M*M-"}) == [0, 1, 0, 2]
