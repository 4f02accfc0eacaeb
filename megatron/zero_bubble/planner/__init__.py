"""The planner: makes a `Plan` (layout, order of operations, memory) from a `PlanRequest`. Pure Python, no torch."""

from megatron.zero_bubble.planner.generate import generate, request_for, schedule_of
from megatron.zero_bubble.planner.layout_plan import Plan, plan_layout
from megatron.zero_bubble.planner.layouts import search_layouts
from megatron.zero_bubble.planner.registry import names, placement_for
from megatron.zero_bubble.planner.request import Layout, PlanRequest
from megatron.zero_bubble.planner.search_extent import all_placements

__all__ = [
    "Layout",
    "Plan",
    "PlanRequest",
    "all_placements",
    "generate",
    "names",
    "placement_for",
    "plan_layout",
    "request_for",
    "schedule_of",
    "search_layouts",
]
