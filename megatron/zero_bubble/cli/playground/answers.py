"""Answers the requests of the playground's page: draws and plots schedules, and saves and opens files.

A request contains flags of `zero-bubble schedule`. The page shows the same numbers and messages as the command, because
the command's own code reads the flags. The browser calls `answer`; tests call `answer` without a browser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.cli.playground.pictures import (
    is_trace,
    picture_of,
    picture_of_run,
    recorded_run,
    trace_errors,
)
from megatron.zero_bubble.cli.schedule.arguments import SimulateFlags
from megatron.zero_bubble.cli.schedule.figures import forget_files
from megatron.zero_bubble.cli.schedule.planned_figures import figures_of_source
from megatron.zero_bubble.planner.request import EFFORT
from megatron.zero_bubble.schedule import Infeasible, simulate
from megatron.zero_bubble.schedule.draw import to_chrome_trace, to_svg
from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.schedule.formats import (
    costs_from_text,
    is_profile,
    profile_from_json,
    schedule_from_text,
    schedule_to_json,
    schedule_to_pytorch_csv,
)
from megatron.zero_bubble.schedule.formats.json_format import COSTS_FORMAT, format_of
from megatron.zero_bubble.session.files import read_file

Words = Sequence[str]
"""Flags of `zero-bubble schedule simulate`."""


def picture(words: Words, is_draft: bool = False) -> dict[str, Any]:
    """Return the simulation of one schedule, with all data that the page draws.

    If `is_draft` is set, the schedule is planned with little search effort.
    """
    flags = _flags(words)
    figures = figures_of_source(flags, effort=0 if is_draft else EFFORT)
    return picture_of(figures, flags.recomputation, flags.time_unit)


def run(file: str, planned: bool) -> dict[str, Any]:
    """Return a recorded run's timeline or, if `planned` is set, a simulation of the run with measured times."""
    measured, memory = recorded_run(read_file(file))
    with trace_errors():
        simulated = simulate(measured.schedule, measured.costs, lengths=measured.lengths)  # checks the order
        return picture_of_run(simulated, {}) if planned else picture_of_run(measured, memory)


def point(words: Words, limit: float, of_dial: bool = False) -> dict[str, Any]:
    """Return the bubble rate and time under a memory limit or, if no plan fits, the smallest limit that allows a plan.

    If `of_dial` is set, the planner compares plans by makespan, as `zero-bubble schedule memory-curve --dial` does.
    """
    try:
        figures = figures_of_source(_flags([*words, f"--memory-limit={limit}"]), takes_makespan=of_dial)
    except Infeasible as error:
        return {"limit": limit, "smallest": error.smallest_limit}
    return {
        "limit": limit,
        "lost": figures.lost,
        "bubble_rate": figures.timeline.bubble_rate,
        "time": figures.iteration_time,
    }


def saved_file(words: Words, kind: str) -> dict[str, str]:
    """Return the name and the text of a file to save.

    Args:
        kind: format of the file, `json`, `csv` (of torch.distributed.pipelining), `svg` or `trace`.
    """
    flags = _flags(words)
    figures = figures_of_source(flags)
    writers: dict[str, tuple[str, Callable[[], str]]] = {
        "json": (".json", lambda: schedule_to_json(figures.schedule)),
        "csv": (".csv", lambda: schedule_to_pytorch_csv(figures.schedule)),
        "svg": (".svg", lambda: to_svg(figures.timeline, time_unit=flags.time_unit, steps=figures.steps)),
        "trace": (".trace.json", lambda: to_chrome_trace(figures.timeline, steps=figures.steps)),
    }
    suffix, write = writers[kind]
    return {"name": figures.schedule.name + suffix, "text": write()}


def opened(file: str) -> dict[str, Any]:
    """Return the flags that the page sets for an opened file: a profile, costs, a schedule, or the trace of a run."""
    text = read_file(file)
    if is_trace(text):
        schedule = recorded_run(text)[0].schedule
        return {"run": file, "pipeline-size": schedule.num_ranks, "num-microbatches": schedule.num_microbatches}
    if is_profile(text):
        ranks, chunks = (placement := profile_from_json(text).placement).num_ranks, placement.num_chunks
        kind = placement.kind if chunks > 1 else None
        return {"costs": file, "pipeline-size": ranks, "num-chunks": chunks, "placement": kind}
    if format_of(text) == COSTS_FORMAT:
        return {"costs": file, "pipeline-size": costs_from_text(text).num_stages}
    schedule = schedule_from_text(text, name=Path(file).stem)
    return {"input": file, "pipeline-size": schedule.num_ranks, "num-microbatches": schedule.num_microbatches}


def _flags(words: Words) -> SimulateFlags:
    return read_flags(SimulateFlags, words, "zero-bubble playground", "", has_help=False)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "picture": picture,
    "run": run,
    "point": point,
    "save": saved_file,
    "opened": opened,
}


def answer(question: str) -> str:
    """Call the function that the JSON request `question` names; return the result, or an error, as JSON."""
    arguments = json.loads(question)
    forget_files()
    try:
        return json.dumps(_ANSWERS[arguments.pop("what")](**arguments), default=float, allow_nan=False)
    except (ValueError, OSError) as error:
        return json.dumps(mistake(error))


_SUBJECTS = (("memory_limit", "memory-limit"), ("chunks", "num-chunks"), ("microbatches", "num-microbatches"))
"""(word, flag) pairs: an error message that names no flag but contains the word is about the flag."""


def mistake(error: Exception) -> dict[str, str]:
    """Return the message of an error, and the flag that the message is about."""
    message = one_line(error)
    if named := re.match(r"arguments? --([\w-]+):? (.*)", message):
        return {"error": named[2], "flag": named[1]}
    by_word = next((flag for word, flag in _SUBJECTS if word in message), "schedule")
    return {"error": message, "flag": "memory-limit" if isinstance(error, Infeasible) else by_word}
