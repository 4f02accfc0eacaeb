"""The results of `zero-bubble benchmark`, as numbers and as a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, TypeVar

from megatron.zero_bubble.cli.benchmark.arguments import BenchmarkFlags
from megatron.zero_bubble.cli.benchmark.contestants import Contestant
from megatron.zero_bubble.cli.benchmark.script_arguments import ScriptArguments
from megatron.zero_bubble.cli.benchmark.training_turn import Turn
from megatron.zero_bubble.cli.output import percent, table_of
from megatron.zero_bubble.schedule import Idle, Timeline
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.model_count import flops_of_sequence

T = TypeVar("T")
_RESAMPLES = 4000
_SEED = 20


@dataclass(frozen=True)
class TrainResult:
    """The measurements of one schedule in all rounds; times are in milliseconds."""

    contestant: Contestant
    turns: tuple[Turn, ...]
    baseline: tuple[Turn, ...]
    flags: BenchmarkFlags
    args: Arguments | ScriptArguments
    """The complete arguments of the baseline training."""
    simulated: Timeline | None
    """Simulation of the schedule with costs measured in the schedule's placement; None without measured costs."""

    @property
    def rounds(self) -> tuple[float, ...]:
        """For every round, the median time of an iteration."""
        return tuple(median(turn.iteration_ms) for turn in self.turns)

    @property
    def measured(self) -> float:
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """Difference between the largest and the smallest of the rounds' median iteration times."""
        return max(self.rounds) - min(self.rounds)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of one GPU, or of one rank on a CPU; None if the flags do not determine a length."""
        length = None if self._varies else self.args.seq_length
        return None if length is None else self._rate_of_sequences * length

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of one GPU: counted as --log-throughput does or, for a Megatron-LM script, as the script prints.

        None if sequences have different lengths, or if the script prints no TFLOP/s.
        """
        if isinstance(self.args, Arguments):
            return None if self._varies else self._rate_of_sequences * flops_of_sequence(self.args) / 1e12
        return _median(value for turn in self.turns for value in turn.tflops)

    @property
    def _varies(self) -> bool:
        """Whether sequences may be shorter than `seq_length`."""
        return isinstance(self.args, Arguments) and self.args.variable_seq_lengths

    @property
    def _rate_of_sequences(self) -> float:
        """Sequences per second of one GPU, or of one rank on a CPU."""
        assert self.args.global_batch_size is not None
        return self.args.global_batch_size / (self.measured / 1e3) / self.flags.num_ranks

    @property
    def idle(self) -> Idle | None:
        """Medians of the measured imbalance between ranks and of the bubble rate; None if no idle time was measured."""
        idles = [idle for turn in self.turns for idle in turn.idle]
        return Idle(median(idle.imbalance for idle in idles), median(idle.bubble for idle in idles)) if idles else None

    @property
    def predicted_bubble_rate(self) -> float | None:
        simulated = None if self.simulated is None else float(self.simulated.bubble_rate)
        return _median((turn.predicted_bubble_rate for turn in self.turns), simulated)

    @property
    def predicted_ms(self) -> float | None:
        simulated = None if self.simulated is None else float(self.simulated.makespan)
        return _median((turn.predicted_ms for turn in self.turns), simulated)

    @property
    def pipeline_ms(self) -> float | None:
        """Measured time of an iteration in the pipeline; None if no training's log has a summary."""
        return _median(turn.pipeline_ms for turn in self.turns)

    @property
    def peak_bytes(self) -> float:
        return max(turn.peak_bytes for turn in self.turns)

    @property
    def is_device_memory(self) -> bool:
        """Whether `peak_bytes` is the peak of the GPU allocator, and not the resident memory of a process."""
        return all(turn.is_device_memory for turn in self.turns)

    @property
    def ratios(self) -> list[float]:
        """For every round, the speedup of this schedule over megatron-core's 1F1B in the same round."""
        return self._ratios(median(turn.iteration_ms) for turn in self.baseline)

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    def ratios_to(self, other: TrainResult) -> list[float]:
        """Return, for every round, the speedup of this schedule over the schedule `other` in the same round."""
        return self._ratios(other.rounds)

    def _ratios(self, rounds: Iterable[float]) -> list[float]:
        return [theirs / mine for theirs, mine in zip(rounds, self.rounds, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON, with keys as in the JSON of `benchmarks.emulate`; missing values are null."""
        placement = self.contestant.placement
        interval = bootstrap_interval(self.ratios)
        return {
            "schedule": self.contestant.name,
            "pipeline_size": self.flags.pipeline_size,
            "num_microbatches": self.flags.num_microbatches,
            "num_chunks": None if placement is None else placement.num_chunks,
            "measured_ms": self.measured,
            "simulated_ms": self.predicted_ms,
            "ideal_ms": float(max(self.simulated.work)) if self.simulated is not None else None,
            "span_ms": self.pipeline_ms,
            **(dict.fromkeys(Idle(0, 0).as_json()) if self.idle is None else self.idle.as_json()),
            "simulated_bubble_rate": self.predicted_bubble_rate,
            "exposed_communication_ms": None,
            "steps_ms": [milliseconds for turn in self.turns for milliseconds in turn.iteration_ms],
            "rounds_ms": list(self.rounds),
            "spread_ms": self.spread,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "tflops_per_gpu": self.tflops,
            "peak_memory_bytes": self.peak_bytes,
            "ratio_to_1f1b": self.ratio,
            "ratio_interval": list(interval) if interval else None,
        }


def _median(values: Iterable[float | None], default: float | None = None) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else default


def train_table(results: list[TrainResult], *, markdown: bool = False) -> str:
    """Return the results as a table, with `-` for missing measurements."""
    columns: dict[str, Callable[[TrainResult], str]] = {
        "schedule": lambda result: result.contestant.name,
        "tokens/s/GPU": lambda result: _or_dash(result.tokens_per_second, "{:.0f}".format),
        "TFLOP/s/GPU": lambda result: _or_dash(result.tflops, "{:.4g}".format),
        "iteration (ms)": lambda result: f"{result.measured:.1f}",
        "spread": lambda result: f"{result.spread:.1f}",
        "idle": lambda result: _or_dash(result.idle, lambda idle: percent(idle.total)),
        "imbalance": lambda result: _or_dash(result.idle, lambda idle: percent(idle.imbalance)),
        "bubble": lambda result: _or_dash(result.idle, lambda idle: percent(idle.bubble)),
        "predicted": lambda result: _or_dash(result.predicted_bubble_rate, percent),
        "memory (MiB)": lambda result: f"{result.peak_bytes / 2**20:.0f}",
        "to 1F1B": lambda result: f"{result.ratio:.3f}",
        "95% interval": lambda result: _or_dash(
            bootstrap_interval(result.ratios), lambda ends: "{:.3f} .. {:.3f}".format(*ends)
        ),
    }
    return table_of(columns, results, markdown=markdown)


def _or_dash(value: T | None, text: Callable[[T], str]) -> str:
    return "-" if value is None else text(value)


def loss_agreement(results: Sequence[TrainResult]) -> str:
    """Compare the losses of every schedule with the losses of the baseline; return a line for each comparison.

    A line shows the largest relative difference between two losses of the same iteration. The losses come from the
    training runs of the last round. The log of a run shows each loss as the mean over a logging interval, with seven
    digits.

    Args:
        results: one result for each schedule, with the baseline first.
    """
    baseline, *others = results
    expected = dict(baseline.turns[-1].losses)
    lines = []
    for result in others:
        pairs = [(loss, expected[at]) for at, loss in result.turns[-1].losses if at in expected]
        largest = max((abs(loss - other) / abs(other) for loss, other in pairs), default=None)
        if largest is None:
            comparison = "printed no losses to compare"
        elif largest == 0:
            comparison = f"the same in every digit of all {len(pairs)} lines, up to iteration {max(expected)}"
        else:
            comparison = (
                f"the same up to {largest:.1e} of their value in {len(pairs)} lines, up to iteration {max(expected)}"
            )
        lines.append(f"losses of {result.contestant.name} and of {baseline.contestant.name}: {comparison}")
    return "\n".join(lines)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the median of `values` by the percentile bootstrap (Efron 1979).

    Each value belongs to one round of training runs, and the bootstrap resamples the rounds with replacement. For fewer
    than three rounds, the function returns None.
    """
    if len(values) < 3:
        return None
    draw = random.Random(_SEED)
    medians = [median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    cuts = quantiles(medians, n=40, method="inclusive")
    return cuts[0], cuts[-1]
