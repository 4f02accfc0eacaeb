"""Measure how the time of a step depends on the size of the vocabulary, in real runs with emulated compute.

    python -m benchmarks.vocabulary_sizes --pipeline-size 8 --num-microbatches 32 --num-layers 32 \\
        --output-layers 0.49 --output-layers 0.98 --output-layers 1.96 --output-layers 3.92

These values are the times of an 8B model's output layer for vocabularies of 32k, 64k, 128k and 256k tokens, in
multiples of a layer's time. For each value, two layouts run: the best layout with embedding and output layer spread
over all ranks, and, without --placement, the best split of whole layers with one stage a rank under `auto`. Memory
limits and model are the same as in `benchmarks.layout_gains`. Because a larger vocabulary is more work, times are
compared with an ideal time, in which all ranks do equal work and never wait. The efficiency is the ideal time divided
by the measured time; the last line has the ratio of the largest to the smallest efficiency of the layouts with a spread
vocabulary.

A mistake in the flags ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, replace

from benchmarks.emulation.emulated_results import Result
from benchmarks.layout_gains import RunFlags, request_of, run_named, words_of
from megatron.zero_bubble.cli.invocation import positive, read_flags, run_command
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.planner import Plan, search_layouts
from megatron.zero_bubble.session.flag_parser import flag

_PROG = "benchmarks.vocabulary_sizes"
_HEADS = ("the output takes", "layout", "measured (ms)", "simulated", "ideal", "efficiency")
_SPREAD = "vocabulary parallel"


@dataclass(frozen=True)
class SizesFlags(RunFlags):
    """the output layer"""

    output_layers: list[float] = flag(
        "how long the output takes, in layers; repeat for more", MISSING, parse=positive, action="append", metavar="N"
    )


def plans_of(flags: SizesFlags) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan) of two layouts for each size, or of one with --placement; a name begins with the size."""
    for size in flags.output_layers:
        request, baseline = request_of(flags, size)
        if flags.placement is None:
            best = search_layouts(replace(request, placements=(baseline.layout.placement,)))
            yield f"{size:g}: auto, {words_of(best)}", best
        best = search_layouts(replace(request, vocabulary_parallel=True))
        yield f"{size:g}: {_SPREAD}, {words_of(best)}", best


def main(argv: list[str] | None = None) -> int:
    return run_command(_PROG, lambda: _measure(sys.argv[1:] if argv is None else argv))


def _measure(argv: list[str]) -> None:
    flags = read_flags(SizesFlags, argv, _PROG, __doc__ or "")
    results = run_named(plans_of(flags), flags.steps)
    document = [
        {**result.as_json(), "ideal_ms": _ideal(result), "efficiency": _efficiency(result)} for result in results
    ]
    flags.deliver(document, sizes_table(results, markdown=flags.markdown))


def _ideal(result: Result) -> float:
    return float(sum(result.timeline.work)) / len(result.timeline.work)


def _efficiency(result: Result) -> float:
    return _ideal(result) / result.measured


def sizes_table(results: Sequence[Result], *, markdown: bool = False) -> str:
    rows = [
        (
            *result.name.split(": ", 1),
            f"{result.measured:.1f}",
            f"{result.simulated:.1f}",
            f"{_ideal(result):.1f}",
            f"{_efficiency(result):.3f}",
        )
        for result in results
    ]
    spread = [_efficiency(result) for result in results if _SPREAD in result.name]
    return table(_HEADS, rows, markdown=markdown) + f"\nlargest to smallest: {max(spread) / min(spread):.3f}\n"


if __name__ == "__main__":
    sys.exit(main())
