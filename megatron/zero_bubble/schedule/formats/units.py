"""The costs of a model's embedding, layers and output as JSON, which jobs write and `zero-bubble plan` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from megatron.zero_bubble.schedule.costs import EXCHANGES
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.formats.json_format import short_integer
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts

_NAMES = tuple(field.name for field in fields(UnitCosts))
_MEASURED = ("time_exchange", "time_collective", "latency_collective", "time_between", "spread", "fused_backward")
"""Fields of `ModelCosts` that a training job measures; zeros by default."""
_MAY_BE_NEGATIVE = ("memory_b", "memory_w")
_CHANGES_OF_MEMORY = ("memory_f", "memory_b", "memory_w")
_MOST_RELEASED = 1.1
"""Largest ratio of released to allocated memory; above 1, because a job takes medians over its ranks of each change."""
_SMALLEST, _LARGEST = 1e-20, 1e20
"""Limits on the absolute value of a number other than 0."""


def units_to_json(model: ModelCosts) -> str:
    """Write the costs of a model's embedding, layers and output as the JSON object that `units_from_json` describes."""
    units = {"embedding": asdict(model.embedding), "layers": list(map(asdict, model.layers))}
    others = {"output": asdict(model.output), "time_comm": model.time_comm, "ties_output": model.ties_output}
    others |= {name: getattr(model, name) for name in _MEASURED if getattr(model, name)}
    return json.dumps({**units, **others}, indent=1) + "\n"


def units_from_json(text: str) -> ModelCosts:
    """Read the costs of a model's embedding, layers and output from a JSON object.

    The object is `{"embedding": U, "layers": [U, ...], "output": U, "time_comm": t, "ties_output": bool}`. An entry U
    has `time_f`, `time_b` and `time_w`, and may have the other fields of `UnitCosts`, which are zeros by default. All
    times have the same unit, and all amounts of memory have the same unit. The memory costs of operations are changes
    of memory: F allocates `memory_f`, and `memory_b` and `memory_w` are negative if B and W release memory.
    `all_to_all_f` is a part of `time_f`, and `all_to_all_b` is a part of `time_b`.

    Raises:
        ScheduleError: the text is not a JSON object with the costs of a model's embedding, layers and output. The error
            message names the first wrong entry.
    """
    try:
        document = json.loads(text, parse_int=short_integer)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"costs of units must be JSON: {error}") from None
    if not isinstance(document, dict):
        raise ScheduleError("costs of units must be an object with embedding, layers and output")
    required = ("embedding", "layers", "output")
    _check_entries("costs of units", document, required, (*required, "time_comm", "ties_output", *_MEASURED))
    layers = document["layers"]
    if not isinstance(layers, list) or not layers:
        raise ScheduleError(f"'layers' must be a list with the costs of every layer, got {json.dumps(layers)[:40]}")
    tied = document.get("ties_output", False)
    if not isinstance(tied, bool):
        raise ScheduleError(f"'ties_output' must be true or false, got {json.dumps(tied)[:40]}")
    measured: dict[str, Any] = {name: _checked_number(name, document.get(name, 0)) for name in _MEASURED}
    return ModelCosts(
        _unit_costs("embedding", document["embedding"]),
        tuple(_unit_costs(f"layer {number}", layer, is_layer=True) for number, layer in enumerate(layers)),
        _unit_costs("output", document["output"]),
        _checked_number("time_comm", document.get("time_comm", 0)),
        tied,
        **measured,
    )


def _unit_costs(where: str, entry: Any, *, is_layer: bool = False) -> UnitCosts:
    if not isinstance(entry, Mapping):
        raise ScheduleError(f"the costs of the {where} must be an object with time_f, time_b and time_w")
    times = ("time_f", "time_b", "time_w")
    _check_entries(f"the costs of the {where}", entry, times, _NAMES, f": {', '.join(_NAMES)}")
    costs = {
        name: _checked_number(f"{name} of the {where}", value, name in _MAY_BE_NEGATIVE)
        for name, value in entry.items()
    }
    for part, whole in EXCHANGES.items():
        if costs.get(part, 0) > costs[whole]:
            raise ScheduleError(
                f"{part} of the {where} must be a part of {whole}, got {costs[part]:g} of {costs[whole]:g}"
            )
    changes = [costs.get(name, 0) for name in _CHANGES_OF_MEMORY]
    allocated, released = sum(max(0, change) for change in changes), sum(max(0, -change) for change in changes)
    if released > allocated * _MOST_RELEASED:
        raise ScheduleError(
            f"{' + '.join(_CHANGES_OF_MEMORY)} of the {where} must not be below zero: the operations would release "
            f"{released:g} and allocate only {allocated:g}"
        )
    if is_layer and not all(costs[name] > 0 for name in times):
        raise ScheduleError(f"the times of the {where} must be above zero")
    return UnitCosts(**costs)


def _check_entries(
    subject: str, entries: Mapping[str, Any], required: Sequence[str], known: Sequence[str], hint: str = ""
) -> None:
    unknown = sorted(entries.keys() - set(known))
    if unknown:
        raise ScheduleError(f"{subject} have an unknown entry {unknown[0]!r}{hint}")
    for name in required:
        if name not in entries:
            raise ScheduleError(f"{subject} lack {name!r}")


def _checked_number(name: str, value: Any, may_be_negative: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not (value == 0 or _SMALLEST <= abs(value) <= _LARGEST):
        limits = f"0, or have a magnitude from {_SMALLEST:g} to {_LARGEST:g}"
        raise ScheduleError(f"{name} must be {limits}, got {json.dumps(value)[:40]}")
    if value < 0 and not may_be_negative:
        raise ScheduleError(f"{name} must not be negative, got {value}")
    return float(value)
