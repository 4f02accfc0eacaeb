"""Formats and prints the output of a run: parameters, layout, plan and idle time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.zero_bubble.runtime.channel_memory import ChannelMemory
from megatron.zero_bubble.runtime.plan_report import Report
from megatron.zero_bubble.runtime.replica_waits import Waits
from megatron.zero_bubble.schedule import Idle, Placement, StageCosts
from megatron.zero_bubble.schedule.hierarchy import Hierarchy
from megatron.zero_bubble.schedule.host_link import host_memory, num_offloaded
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.session.flags import flags_text
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.layout_words import gain_words, layers_words, named_plans, rehearsal_words

if TYPE_CHECKING:
    from megatron.zero_bubble.mcore.linear import Gradients
    from megatron.zero_bubble.runtime.step_planner import OrderTimes
    from megatron.zero_bubble.session.layout_choice import LayoutChoice


ModelRank = tuple[int, int]
"""(tensor-parallel rank, pipeline rank)."""
LOUD = 0.01
"""A module whose W is not deferred causes a warning if the module has at least this share of a rank's parameters."""
_MOST_NAMED = 16
"""Largest number of replicas for which a log line lists how long each replica waited for other replicas."""


def print_line(message: str) -> None:
    """Print `message` on this rank, and flush the output."""
    print(message, flush=True)


def print_rank_0(message: str) -> None:
    """Print `message` on global rank 0 only."""
    if dist.get_rank() == 0:
        print_line(message)


def print_error(program: str, message: object) -> None:
    """Print, on this rank, the error that ends `program`, and flush the output."""
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)


def flush_output() -> None:
    """Flush the output streams of a process that ends; ignore errors, such as the error of a closed stream."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def parameter_line(ranks: Mapping[ModelRank, Gradients]) -> str:
    """A line with the number of parameters on the first tensor-parallel rank of every pipeline rank."""
    sizes = ", ".join(str(gradients.total) for (tensor, _), gradients in ranks.items() if tensor == 0)
    part = "" if all(tensor == 0 for tensor, _ in ranks) else "first tensor-parallel rank of each "
    return f" > number of parameters on {part or 'each '}pipeline rank: {sizes}"


def deferred_line(ranks: Mapping[ModelRank, Gradients]) -> str:
    """A line with the share of the model's matrix-product weights whose gradients are computed in W and not in B."""
    deferred = sum(gradients.in_w for gradients in ranks.values())
    weights = deferred + sum(size for gradients in ranks.values() for _, size in gradients.unsplit)
    share = deferred / weights if weights else 1.0
    return f" > W is deferred for {share:.1%} of the weights, without embeddings, norms and biases"


def unsplit_line(name: str, share: float) -> str:
    loud = "WARNING: " if share >= LOUD else ""
    return f" > {loud}not split, its weight's gradient is computed in B: {name}, {share:.2%} of a rank's parameters"


def layout_lines(choice: LayoutChoice, flags: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table of the chosen layout, the runners-up and Megatron's split.

    Args:
        flags: names and values of the flags that select the chosen layout.
    """
    given = flags.get("hybrid_layer_pattern")
    pattern = None if given is None else HybridPattern.parse(given)
    chosen = choice.plan
    schedule = chosen.timeline.schedule
    yield f" > layout chosen for {schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches"
    yield f"     F + B + W of a microbatch (ms): {'; '.join(_unit_words(choice.request.model, pattern))}"
    rows: list[tuple[str, ...]] = [("", "layers of each stage", "time (ms)", "bubble", "idle", "fullest rank (MiB)")]
    for name, plan in named_plans(chosen, choice.megatrons):
        shares = (f"{share:.2%}" for share in (plan.timeline.bubble_rate, plan.timeline.idle.total))
        rows.append((name, layers_words(plan.layout, pattern), f"{plan.time:.1f}", *shares, f"{_mib(plan.memory):.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        yield f"     {'  '.join((*map(str.ljust, cells[:2], widths), *map(str.rjust, cells[2:], widths[2:])))}"
    if choice.rehearsed:
        yield f"     rehearsed, {rehearsal_words(choice.rehearsed, choice.request.usual)}"
    if choice.megatrons:
        yield f"     speed relative to Megatron's split: {gain_words(chosen, choice.megatrons)}"
    yield f"     the same layout in another run: {flags_text(flags)}"


def _unit_words(model: ModelCosts, pattern: HybridPattern | None) -> Iterator[str]:
    """Yield the times of each kind of layer, of the embedding, of the output and of a message, as text.

    Layers of one kind have equal costs and equal symbols.
    """
    symbols = [""] * len(model.layers) if pattern is None else [f"{symbol}: " for symbol in pattern.symbols]
    for (symbol, layer), count in Counter(zip(symbols, model.layers, strict=True)).items():
        yield f"{count} layers {symbol}{_times(layer)} each"
    yield f"embedding {_times(model.embedding)}"
    yield f"output {_times(model.output)}"
    yield f"a message {model.time_comm:.2f}"


def without_gain(ratio: float) -> str:
    """A note that F and B as one operation take `ratio` times as long as F and B one after the other."""
    return (
        f"F and B as one operation take {ratio:.2f} times as long as one after the other on this machine: "
        "the plan does not pair them"
    )


def _times(unit: UnitCosts) -> str:
    words = " + ".join(f"{time:.2f}" for time in (unit.time_f, unit.time_b, unit.time_w))
    if not unit.all_to_all_f and not unit.all_to_all_b:
        return words
    return f"{words} (all-to-all {unit.all_to_all_f:.2f} + {unit.all_to_all_b:.2f})"


def describe_plan(report: Report) -> str:
    """Describe a plan in several lines: costs of each stage, the schedule, and its predicted time and memory."""
    prediction = report.prediction
    profile, schedule = prediction.profile, prediction.schedule
    costs, placement = profile.costs, profile.placement
    source = f"measured up to step {report.step}, spread {profile.noise:.1%}" if report.step else "from a profile"
    lines = [f" > zero-bubble plan; times {source}"]
    if report.differences:
        lines.append(f"     compared with the plan before: {'; '.join(map(str, report.differences))}")
    if report.trial is not None:
        lines.append(f"     measured in both orders: {report.trial}")
    lines += _costs_table(costs, placement)
    origin = "planned" if report.is_new_plan else "kept"
    limits = report.memory_limit or ()
    of_ranks = limits[:1] if len(set(limits)) == 1 else limits
    limit = f", memory limit {' '.join(f'{_mib(most):.1f}' for most in of_ranks)} MiB" if limits else ""
    lines.append(f"     schedule {schedule.name} ({origin}) for {schedule.num_microbatches} microbatches{limit}")
    lines.append(f"     predicted: {prediction.idle}, {prediction.time:.1f} ms, {prediction.gain}")
    if report.ratio_of_pairs is not None and not (costs.has_all_to_all or schedule.has_pairs):
        lines.append(f"     {without_gain(report.ratio_of_pairs)}")
    lines.append(f"     peak activations of each rank (MiB): {_mibs(prediction.peak_bytes)}")
    if any(profile.inside):
        inside = _mibs(profile.inside_ranks)
        lines.append(f"     temporary memory of operations on each rank, not in these peaks (MiB): {inside}")
    if max(schedule.groups, default=1) > 1:
        groups = ", ".join(map(str, schedule.groups))
        lines.append(f"     groups of layers in which each stage restores activations: {groups}")
    if offloaded := num_offloaded(schedule):
        lines.append(
            f"     copied to the host and back: {offloaded} of {schedule.num_stages * schedule.num_microbatches} "
            f"forwards; host memory of each rank (MiB): {_mibs(host_memory(schedule, costs))}"
        )
    if limits and any(peak > most * (1 + 1e-9) for peak, most in zip(prediction.peak_bytes, limits, strict=True)):
        lines.append("     a peak is above the memory limit, to which this schedule does not adapt")
    return "\n".join(lines)


def _costs_table(costs: StageCosts, placement: Placement) -> Iterator[str]:
    """The lines of a table of each stage's costs, with columns for R, D and H if the costs include these operations."""
    recomputes, offloads, stages = any(costs.time_r), any(costs.memory_d), range(costs.num_stages)
    times = {"F": costs.time_f, "B": costs.time_b, "W": costs.time_w}
    times |= {"R": costs.time_r} if recomputes else {}
    times |= {"D": costs.time_d, "H": costs.time_h} if offloads else {}
    memory = {"kept by F": costs.memory_f}
    memory |= {"restored by R": costs.memory_r} if recomputes else {}
    memory |= {"copied by D": costs.memory_d} if offloads else {}
    memory |= {"for W": tuple(-change for change in costs.memory_w)}
    columns: dict[str, Iterable[str]] = {
        "     stage": map(str, stages),
        "  rank": map(str, map(placement.rank_of, stages)),
    }
    columns |= {f"{kind:>5} (ms)": [f"{time:.2f}" for time in values] for kind, values in times.items()}
    columns["  to next (ms)"] = (*(f"{time:.2f}" for time in costs.time_comm), "")
    columns |= {f"  {name} (MiB)": [f"{_mib(amount):.1f}" for amount in values] for name, values in memory.items()}
    yield "".join(columns)
    for cells in zip(*columns.values(), strict=True):
        yield "".join(map(str.rjust, cells, map(len, columns)))


def _mib(num_bytes: float) -> float:
    return num_bytes / 2**20


def _mibs(sizes: Iterable[float]) -> str:
    return ", ".join(f"{_mib(num_bytes):.1f}" for num_bytes in sizes)


def channels_line(memory: ChannelMemory) -> str:
    """A line about the device memory that the communicators between stages take on a rank."""
    taken = _mib(memory.num_bytes)
    return (
        f" > channels between stages: {memory.num_channels} communicators on a rank take {taken:.0f} MiB of its "
        f"device, {taken / max(1, memory.num_channels):.0f} MiB each"
    )


def describe_hierarchy(hierarchy: Hierarchy) -> str:
    """A line that says after which iterations, and in which groups, replicas average their parameters."""
    levels = ", ".join(
        f"{level.group_size} every {level.period} iteration{'s' * (level.period > 1)}" for level in hierarchy.levels
    )
    after = f" after {hierarchy.warmup} synchronous iterations" if hierarchy.warmup else ""
    return f" > hierarchical SGD{after}: replicas step alone and average their parameters in groups of {levels}"


def wait_fields(waits: Waits | None) -> str:
    """Return the time for which replicas waited for each other, as text for a log line; empty if `waits` is None."""
    if waits is None:
        return ""
    each = [1000.0 * seconds for seconds in waits.seconds]
    text = " ".join(f"{milliseconds:.1f}" for milliseconds in each)
    if len(each) > _MOST_NAMED:
        text = f"{min(each):.1f} to {max(each):.1f}, mean {sum(each) / len(each):.1f}"
    return f" waits of replicas (ms): {text} | slowest replica: {waits.slowest} |"


def idle_fields(measured: Idle | None, predicted: Idle | None) -> str:
    """Return the measured and the predicted idle share of a pipeline, as text for the end of a log line.

    The text contains three measured values (idle share, imbalance and bubble rate) if `measured` is given, and the
    predicted bubble rate if `predicted` is given.
    """
    line = ""
    if measured is not None:
        line += f" idle: {measured.total:.2%} | imbalance: {measured.imbalance:.2%} |"
        line += f" bubble rate: {measured.bubble:.2%} |"
    return line + (f" predicted: {predicted.bubble:.2%} |" if predicted is not None else "")


def order_fields(times: OrderTimes | None) -> str:
    """Return the gain from planned microbatch orders, as text for the end of a log line; empty without planned orders.

    The gain is the simulated step time with microbatches in the order of the data, divided by the simulated step time
    with microbatches in the planned order. Planning counts as hidden if a step waits at most one millisecond for the
    planned order.
    """
    if times is None:
        return ""
    line = ""
    if times.num_steps:
        gain, planning = times.predicted_in_data_order / times.predicted, times.planning / times.num_steps
        line += f" microbatch order: {gain:.2f} times as fast, planned in {planning:.1f} ms, "
        line += (
            f"not hidden in {times.num_not_hidden} of {times.num_steps} steps |" if times.num_not_hidden else "hidden |"
        )
    if times.num_late:
        line += f" steps with an earlier order: {times.num_late} |"
    if times.num_in_less_memory:
        line += f" steps in less memory: {times.num_in_less_memory} of {times.num_steps} |"
    return line


def idle_scalars(measured: Idle | None, predicted: Idle | None) -> dict[str, float]:
    """Return the given idle shares, measured and predicted, in a dictionary keyed by tags for TensorBoard and W&B."""
    scalars: dict[str, float] = {}
    if measured is not None:
        scalars |= {"idle": measured.total, "imbalance": measured.imbalance, "bubble-rate": measured.bubble}
    if predicted is not None:
        scalars |= {"predicted-idle": predicted.total, "predicted-bubble-rate": predicted.bubble}
    return scalars
