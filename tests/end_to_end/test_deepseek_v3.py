"""A scaled-down DeepSeek-V3 trains with `--zero-bubble` on two pipeline ranks whose experts are on two ranks each.

It has latent attention, a dense first layer, experts, a shared expert, a sigmoid router with a bias and a prediction
layer. The layout is chosen. Its numbers are those of megatron-core's schedule on that layout, or in a V, which
megatron-core does not have, those of a plan without pairs.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.experts import OVERLAP
from tests.launch import DEEPSEEK_V3, TINY_GPT
from tests.trainings import Trainings

FLAGS = (
    *(*TINY_GPT, *DEEPSEEK_V3, "--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"),
    *("--global-batch-size", "16", "--train-iters", "6", "--clip-grad", "0.3"),
)
PROFILED = ("--zero-bubble", "--zero-bubble-profile-iters", "2", "3")


# test_numerics.py trains such a model without pairs on a given layout.
@pytest.mark.parametrize(
    "overlap", [pytest.param((), id="alone", marks=pytest.mark.exhaustive), pytest.param((OVERLAP,), id="in pairs")]
)
@pytest.mark.parametrize("placement", ["linear", pytest.param("v", marks=pytest.mark.exhaustive)])
def test_the_chosen_layout_computes_what_megatron_core_computes_on_it(
    tmp_path: Path, placement: str, overlap: tuple[str, ...]
) -> None:
    chosen = (*FLAGS, *PROFILED, "--zero-bubble-placement", placement, *overlap)
    ours = Trainings(4, {"chosen": chosen}, tmp_path)
    printed = ours.printed("chosen")
    said = "(all-to-all " in printed or "F and B as one operation take " in printed
    assert said == bool(overlap)
    layout = shlex.split(re.findall(r"^     the same layout in another run: (.*)$", printed, re.MULTILINE)[0])
    assert layout[0] == "--pipeline-model-parallel-layout"
    seeds = "--zero-bubble-seed-by-layer"
    same = (*layout[:2], seeds) if placement == "linear" else (*layout, "--zero-bubble-schedule", "zb-v")
    other = Trainings(4, {"other": (*FLAGS, *same)}, tmp_path)
    assert ours.numerics("chosen") == other.numerics("other")
