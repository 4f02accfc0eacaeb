"""When a job compares its planned order with megatron-core's own order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.zero_bubble.planner.megatrons_split import megatrons_layout
from megatron.zero_bubble.planner.prediction import MegatronsTime
from megatron.zero_bubble.session.layout_choice import ChosenLayout
from megatron.zero_bubble.session.layout_words import flags_of_layout
from megatron.zero_bubble.session.settings import job_settings
from tests.checked_flags import checked_job

SPLIT = ChosenLayout(flags_of_layout(megatrons_layout(8, 4), None, None), is_megatrons_split=True)
KEPT = {"--zero-bubble": None, "--zero-bubble-keep-layout": None}
POST_VALIDATION = {"--zero-bubble-post-validation": None, "--untie-embeddings-and-output-weights": None}


@pytest.mark.parametrize(
    ("given", "choice", "tries"),
    [
        (KEPT, None, True),
        ({"--zero-bubble": None}, SPLIT, True),
        ({"--zero-bubble": None}, replace(SPLIT, is_megatrons_split=False, megatrons=MegatronsTime(1.0, 1.0)), False),
        ({"--zero-bubble-schedule": "auto"}, None, False),
        ({**KEPT, **POST_VALIDATION}, None, False),
    ],
)
def test_only_an_order_that_the_job_chose_for_megatrons_layout_is_compared(
    given: dict[str, Any], choice: ChosenLayout | None, tries: bool
) -> None:
    flags = checked_job(given).flags
    planning = job_settings(flags, {}, has_cuda=False, choice=choice).planning
    assert planning.tries_own_order is tries
