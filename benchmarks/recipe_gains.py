"""Predicts the gain of zero bubble for published recipes, with all and with a quarter of the microbatches.

    python -m benchmarks.recipe_gains --markdown

The recipes are the files of examples/recipes. A recipe has flags of Megatron-LM, and the flags of the published layout
below the line "# layout:". As in `zero-bubble estimate`, each recipe is estimated twice: with the published layout
under megatron-core's own schedule, and with the layout that `--zero-bubble` chooses. The chosen layout is the published
layout unless another layout is at least 2% faster.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.zero_bubble.cli.estimate.arguments import EstimateFlags
from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import (
    Estimate,
    as_megatron_runs,
    estimate,
    estimate_layout,
    gib,
)
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.cli.output import percent, table

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "recipes"
CLUSTER = ("--device-tflops", "989", "--mfu", "0.45", "--interconnect-bandwidth", "50")
"""An H100: bf16 peak, and one link of 400 Gbit/s for each device."""
_HEADS = ("recipe", "p, v, m", "bubble", "idle, GiB", "chosen", "idle, GiB", "gain")


@dataclass(frozen=True)
class Recipe:
    """A published recipe of a training."""

    name: str
    world_size: int
    flags: tuple[str, ...]
    """Flags of Megatron-LM, without the flags of the layout."""
    layout: tuple[str, ...]
    """Flags that determine the layout."""

    @classmethod
    def read(cls, path: Path) -> Recipe:
        lines = path.read_text(encoding="utf-8").splitlines()
        (size,) = (line.split(":")[1] for line in lines if line.startswith("# world-size:"))
        cut = lines.index("# layout:")
        flags, layout = (
            tuple(word for line in part if not line.startswith("#") for word in line.split())
            for part in (lines[:cut], lines[cut:])
        )
        return cls(path.stem, int(size), flags, layout)

    def with_batch(self, parts: int) -> Recipe:
        """The recipe with a global batch that is divided by `parts`."""
        where = self.flags.index("--global-batch-size") + 1
        batch = str(int(self.flags[where]) // parts)
        return replace(self, flags=(*self.flags[:where], batch, *self.flags[where + 1 :]))


@dataclass(frozen=True)
class RecipeGain:
    """Time and memory of a recipe, with the published layout and with the chosen layout."""

    recipe: Recipe
    published: Estimate
    chosen: Estimate

    @property
    def times(self) -> float:
        return as_megatron_runs(self.published).iteration_ms / self.chosen.iteration_ms

    def row(self) -> tuple[str, ...]:
        schedule = self.published.timeline.schedule
        p, v, m = schedule.num_ranks, schedule.num_chunks, schedule.num_microbatches
        placement = self.chosen.timeline.schedule.placement
        shards = ", shards" if self.chosen.job.flags.vocabulary_parallel else ""
        return (
            self.recipe.name,
            f"{p}, {v}, {m}",
            percent(self.published.timeline.idle.bubble),
            _idle_and_memory(self.published),
            f"{placement.kind}, {placement.num_chunks}{shards}",
            _idle_and_memory(self.chosen),
            f"{self.times:.3f}",
        )


def _idle_and_memory(estimate: Estimate) -> str:
    return f"{percent(estimate.timeline.idle.total)}, {gib(max(estimate.total_bytes))}"


def gain_of(recipe: Recipe) -> RecipeGain:
    """Estimate the published layout under megatron-core's schedule, and the layout that `--zero-bubble` chooses."""
    size = ("--world-size", str(recipe.world_size), *CLUSTER)

    def job(*flags: str) -> EstimatedJob:
        words = [*size, "--", *recipe.flags, *flags]
        return replace(EstimatedJob.of(read_flags(EstimateFlags, words, "recipe_gains", "")), is_quick=True)

    published = job(*recipe.layout)
    name = "1f1b" if published.flags.model_chunks is None else "interleaved-1f1b"
    chosen = estimate_layout(job(*recipe.layout, "--zero-bubble"), frees_layout=True)
    return RecipeGain(recipe, estimate(published, name), chosen)


def gains(paths: Sequence[Path], parts: Sequence[int]) -> Iterator[RecipeGain]:
    for path in paths:
        for part in parts:
            yield gain_of(Recipe.read(path).with_batch(part))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", type=Path, help="files such as those of examples/recipes (default: all)")
    parser.add_argument("--parts", nargs="+", type=int, default=[1, 4], help="divide the global batch by each of these")
    parser.add_argument("--markdown", action="store_true", help="write the table in Markdown")
    flags = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    rows = []
    for gain in gains(flags.recipes or sorted(RECIPES.glob("*.args")), flags.parts):
        rows.append(gain.row())
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    print(table(_HEADS, rows, markdown=flags.markdown), end="")


if __name__ == "__main__":
    main()
