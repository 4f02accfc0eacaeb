"""The settings of megatron-core with which a forward draws random numbers."""

from __future__ import annotations

RANDOM_SETTINGS = (
    *("attention_dropout", "hidden_dropout", "moe_input_jitter_eps"),
    *("moe_router_force_load_balancing", "moe_router_force_biased"),
)
"""Names of configuration fields; a forward draws random numbers if one of the fields is set."""
