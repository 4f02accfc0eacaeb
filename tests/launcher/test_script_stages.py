"""A script builds its model for the stages of a placement."""

from __future__ import annotations

import inspect

from megatron.core import parallel_state

from megatron.zero_bubble.launcher.script_stages import ScriptStages
from megatron.zero_bubble.schedule import Placement


def provide(pre_process=True, post_process=True, vp_stage=None):
    return pre_process, post_process


def test_the_model_provider_learns_the_ends_of_a_v(monkeypatch):
    provider = ScriptStages(Placement("v", 2, 2)).placed_provider(provide)
    assert inspect.signature(provider) == inspect.signature(provide)
    ends = []
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        # Megatron-LM's own placement has the last stage on the last rank.
        megatrons = ((rank == 0 and chunk == 0, rank == 1 and chunk == 1) for chunk in range(2))
        ends += [
            provider(pre_process=first, post_process=last, vp_stage=chunk)
            for chunk, (first, last) in enumerate(megatrons)
        ]
    assert ends == [(True, False), (False, True), (False, False), (False, False)]


def test_in_other_placements_the_model_provider_is_the_scripts():
    assert ScriptStages(Placement("interleaved", 2, 2)).placed_provider(provide) is provide
    assert ScriptStages(Placement("v", 2, 2)).placed_provider(None) is None
