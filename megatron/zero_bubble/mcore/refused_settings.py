"""Settings of megatron-core that no zero-bubble schedule supports. Nothing here imports megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "overlap_moe_expert_parallel_comm": "it brings its own pipeline schedule",
        "overlap_dispatch_backward_with_experts_wgrad": "megatron-core then runs the W of experts itself",
        "enable_autocast": "backward runs under autocast, but W runs later, outside of it",
        "tp_comm_overlap": "Transformer Engine cannot defer W together with userbuffers",
        "fine_grained_activation_offloading": "W may need a tensor that it has released after B",
        "moe_paged_stash": "it records the order of operations of megatron-core's own schedule",
    }
)
"""Names of the settings, with the reasons. Older versions lack some of them."""
