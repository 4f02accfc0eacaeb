"""Each recipe of examples/recipes is complete, and trains scaled down with the numbers of megatron-core's own schedule.

`make test` trains a dense model and one of experts; the others are exhaustive.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recipe_gains import RECIPES, Recipe
from tests.launch import ROOT
from tests.trainings import run_trainings

NAMES = sorted(path.stem for path in RECIPES.glob("*.args"))
SMALL = {
    "--num-layers": "4",
    "--hidden-size": "48",
    "--ffn-hidden-size": "64",
    "--num-attention-heads": "4",
    "--num-query-groups": "2",
    "--kv-channels": "12",
    "--seq-length": "32",
    "--vocab-size": "127",
    "--num-experts": "4",
    "--moe-ffn-hidden-size": "32",
    "--moe-router-topk": "2",
    "--moe-shared-expert-intermediate-size": "32",
    "--moe-layer-freq": "([0]*1+[1]*3)",
    "--q-lora-rank": "24",
    "--kv-lora-rank": "16",
    "--mamba-state-dim": "16",
    "--mamba-head-dim": "8",
    "--mamba-num-groups": "2",
    "--hybrid-layer-pattern": "M-*M|M-*-",
    "--tensor-model-parallel-size": "1",
    "--context-parallel-size": "1",
    "--expert-model-parallel-size": "1",
    "--pipeline-model-parallel-size": "2",
    "--global-batch-size": "4",
}
LATENT = ("--qk-head-dim", "8", "--v-head-dim", "12", "--qk-pos-emb-head-dim", "4")
LEFT_OUT = {"--moe-grouped-gemm": 0, "--sequence-parallel": 0, "--mamba-num-heads": 1}
"""Flags that need Transformer Engine, several tensor ranks or the original width, and how many values they have."""
RUN = ("--train-iters", "3", "--lr", "1e-3", "--clip-grad", "1.0", "--log-interval", "1", "--eval-iters", "0")
FAST = ("llama3_70b", "qwen3_235b")


def scaled_down(recipe: Recipe) -> list[str]:
    """The flags of a recipe for a model of a few layers on two pipeline ranks."""
    words, flags = iter(recipe.flags), []
    for word in words:
        if word in LEFT_OUT:
            for _ in range(LEFT_OUT[word]):
                next(words)
            continue
        flags.append(word)
        if word in SMALL:
            next(words)
            flags.append(SMALL[word])
    if "--num-experts" in flags and "--disable-bias-linear" not in flags:
        flags.append("--disable-bias-linear")  # local experts have no biases
    return [*flags, *RUN, *(LATENT if "--multi-latent-attention" in flags else ())]


def test_there_are_six_models_and_the_page_lists_them() -> None:
    page = (RECIPES / "README.md").read_text()
    assert len(NAMES) == 6
    assert all(f"`{name}.args`" in page for name in NAMES)
    gains = (ROOT / "docs" / "who_gains.md").read_text()
    assert all(f"| {name} " in gains for name in NAMES)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES]
)
def test_a_recipe_scaled_down_has_the_numbers_of_megatron_cores_own_schedule(name: str, tmp_path: Path) -> None:
    flags = scaled_down(Recipe.read(RECIPES / f"{name}.args"))
    run_trainings(2, {"own": flags, "zb-h1": [*flags, "--zero-bubble-schedule", "zb-h1"]}, tmp_path)
    assert (tmp_path / "own.jsonl").read_bytes() == (tmp_path / "zb-h1.jsonl").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_quarter_of_a_recipe_has_a_quarter_of_its_microbatches(name: str) -> None:
    whole = Recipe.read(RECIPES / f"{name}.args")
    batch = whole.flags.index("--global-batch-size") + 1
    assert int(whole.flags[batch]) == 4 * int(whole.with_batch(4).flags[batch])
