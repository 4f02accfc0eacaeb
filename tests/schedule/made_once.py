"""Schedules that several tests need alike: made once."""

from __future__ import annotations

from functools import cache

from megatron.zero_bubble.planner import generate

made_once = cache(generate)
