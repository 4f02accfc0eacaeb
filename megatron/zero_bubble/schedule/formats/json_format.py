"""Schedules and costs as JSON, with an exact round trip.

    {"format": "megatron-zero-bubble schedule", "version": 1, "name": "zb-h1",
     "placement": {"kind": "linear", "num_ranks": 2, "num_chunks": 1},
     "num_microbatches": 2, "ops": ["F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1"]}

    {"format": "megatron-zero-bubble costs", "version": 1, "time_f": [1.5, 2], "time_b": [1.5, 2],
     "time_w": [1, 1], "time_comm": [0.1], "memory_f": [1, 1], "memory_b": [-0.5, -0.5], "memory_w": [-0.5, -0.5]}

A schedule whose stages recompute activations in groups of layers also has `groups`, the number of groups of each stage.
Costs may have the optional fields of `StageCosts`: `saved_bw`, and fields for recomputation (`time_r`, `memory_r`,
`num_blocks`, `memory_outside`), offload, experts, and vocabulary shards (`time_e`, `time_ew`, `time_s`, `time_t`,
`memory_s`, `memory_t`, `latency_collective`). `schedule_from_json` and `costs_from_json` refuse JSON with a different
`format`, a later `version`, an unknown key or a missing key.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from megatron.zero_bubble.schedule.costs import OPTIONAL, StageCosts
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule

VERSION = 1
_SCHEDULE = "megatron-zero-bubble schedule"
COSTS_FORMAT = "megatron-zero-bubble costs"
_MOST_DIGITS = 60
"""Largest number of digits of an integer; an integer with at most 60 digits fits in a float."""


def schedule_to_json(schedule: Schedule) -> str:
    """Write a schedule, with or without communication, as JSON with one line for each rank."""
    document = {
        "format": _SCHEDULE,
        "version": VERSION,
        "name": schedule.name,
        "placement": asdict(schedule.placement),
        "num_microbatches": schedule.num_microbatches,
        "ops": [" ".join(map(str, ops)) for ops in schedule.ops],
        **({"groups": list(schedule.groups)} if schedule.groups else {}),
    }
    return json.dumps(document, indent=1) + "\n"


def schedule_from_json(text: str) -> Schedule:
    """Read a schedule from the JSON of `schedule_to_json`; the schedule is not validated.

    Raises:
        ScheduleError: the text is not in the format of `schedule_to_json`.
    """
    keys = {"name", "placement", "num_microbatches", "ops"}
    document = _document(text, _SCHEDULE, keys, frozenset({"groups"}))
    placement = placement_of(document["placement"])
    _check_whole("num_microbatches", document["num_microbatches"])
    ops = document["ops"]
    if not isinstance(ops, list) or not all(isinstance(line, str) for line in ops):
        raise ScheduleError("ops must be a list with one string a rank")
    groups = document.get("groups", [])
    if not isinstance(groups, list) or not all(type(number) is int for number in groups):
        raise ScheduleError(f"groups must be a list of whole numbers, one a stage, got {json.dumps(groups)[:60]}")
    if not isinstance(document["name"], str):
        raise ScheduleError(f"the name must be a string, got {document['name']!r}")
    return Schedule(
        document["name"],
        placement,
        document["num_microbatches"],
        tuple(tuple(Op.parse(word) for word in line.split()) for line in ops),
        tuple(groups),
    )


def placement_of(document: object) -> Placement:
    """Make a placement from its JSON object.

    Raises:
        ScheduleError: `document` is not an object with the fields of a `Placement`, or the placement is not valid.
    """
    if not isinstance(document, dict) or set(document) != {"kind", "num_ranks", "num_chunks"}:
        raise ScheduleError("the placement needs the keys kind, num_ranks and num_chunks")
    for name in ("num_ranks", "num_chunks"):
        _check_whole(name, document[name])
    return Placement(**document)


def _check_whole(name: str, value: object) -> None:
    if type(value) is not int:
        raise ScheduleError(f"{name} must be a whole number, got {value!r}")


def costs_to_json(costs: StageCosts) -> str:
    """Write costs as JSON, with stages in model order; exact fractions are written as floats."""
    numbers = {field.name: list(getattr(costs, field.name)) for field in fields(costs)}
    numbers = {name: values for name, values in numbers.items() if any(values) or name not in OPTIONAL}
    lines = [f" {json.dumps(key)}: {json.dumps(values, default=float)}" for key, values in numbers.items()]
    head = [f' "format": {json.dumps(COSTS_FORMAT)}', f' "version": {VERSION}']
    return "{\n" + ",\n".join(head + lines) + "\n}\n"


def costs_from_json(text: str) -> StageCosts:
    """Read costs from the JSON of `costs_to_json`.

    Raises:
        ScheduleError: the text is not in the format of `costs_to_json`.
    """
    keys = {field.name for field in fields(StageCosts)}
    document = _document(text, COSTS_FORMAT, keys.difference(OPTIONAL), frozenset(OPTIONAL))
    keys &= set(document)
    for key in sorted(keys):
        values = document[key]
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise ScheduleError(f"{key} must be a list of numbers, one a stage, got {json.dumps(values)[:60]}")
    return StageCosts(**{key: tuple(document[key]) for key in keys})


def _document(text: str, format_name: str, keys: set[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Parse JSON of the format `format_name`; it must have all keys in `keys`, and may have the keys in `optional`."""
    document = parsed(text, format_name)
    given = set(document) - {"format", "version"} - optional
    if given != keys:
        problem = f"lacks {min(keys - given)}" if keys - given else f"has the unknown key {min(given - keys)}"
        raise ScheduleError(f"the {format_name} {problem}")
    return document


def parsed(text: str, format_name: str) -> dict[str, Any]:
    """Parse JSON of the format `format_name` in a version from 1 to `VERSION`.

    Raises:
        ScheduleError: the text is not JSON of the format `format_name`, or its version is not from 1 to `VERSION`.
    """
    try:
        document = json.loads(text, parse_int=short_integer)
    except ValueError as error:
        raise ScheduleError(f"not JSON: {error}") from None
    except RecursionError:
        raise ScheduleError("not JSON of this format: nested too deeply") from None
    if not isinstance(document, dict) or document.get("format") != format_name:
        raise ScheduleError(f'expected a JSON object with "format": "{format_name}"')
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ScheduleError(f"version {version!r} of the format is unknown: this release reads versions 1 to {VERSION}")
    return document


def format_of(text: str) -> object:
    """Return the value of `format` in a JSON object; None if `text` is no such object."""
    try:
        document = json.loads(text, parse_int=short_integer)
    except (ValueError, RecursionError):
        return None
    return document.get("format") if isinstance(document, dict) else None


def short_integer(digits: str) -> int:
    """Parse an integer in JSON; `json.loads` calls `short_integer` for every integer.

    Args:
        digits: the integer in decimal digits, with a sign if it is negative.

    Raises:
        ValueError: the integer has more than 60 digits.
    """
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"the integer {digits[:12]}... has {len(digits)} digits, at most {_MOST_DIGITS} are allowed")
    return int(digits)
