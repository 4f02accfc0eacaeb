"""Refuses settings of Megatron that no zero-bubble schedule supports, or that a feature in use does not support."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from megatron.zero_bubble.mcore.refused_settings import REFUSALS, Feature, Refusal

_FLAGS = {"fp8": "--fp8-format", "fp4": "--fp4-format", "logit_dtype": "--output-logit-dtype"}
"""Refused setting whose flag has another name than the setting -> name of the flag."""


def flag_of_setting(name: str) -> str:
    """Return the name of Megatron-LM's flag for a refused setting."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def refuse_with_schedule(settings: object, schedule: str) -> None:
    """Refuse a script's arguments that no zero-bubble schedule supports.

    Args:
        settings: an object with the settings as attributes; settings that a version of Megatron lacks may be missing.
        schedule: the flag by which the user asked for a schedule; the error message names this flag.

    Raises:
        ValueError: an argument is unsupported; the message names the argument, the reason and any alternative.
    """
    for name, value, row in unsupported(settings):
        raise ValueError(f"{_given(name, value)} does not work with {schedule}: {_explained(row)}")


def refuse_with_features(settings: object, features: Collection[Feature]) -> None:
    """Refuse the arguments that a feature in use does not support.

    Raises:
        ValueError: a feature does not support an argument; the message has the argument, the reason and any
            alternative.
    """
    for feature in features:
        for name, value, row in unsupported(settings, feature):
            raise ValueError(f"{feature.value} does not work with {_given(name, value)}: {_explained(row)}")


def works_with(settings: object, feature: Feature) -> bool:
    """Tell whether a feature supports all values in `settings`."""
    return next(unsupported(settings, feature), None) is None


def unsupported(settings: object, feature: Feature | None = None) -> Iterator[tuple[str, Any, Refusal]]:
    """Yield name, value and `Refusal` of each setting that `feature` refuses.

    If `feature` is None, yield the settings that every schedule refuses.
    """
    for row in REFUSALS:
        if feature in row.features or (feature is None and not row.features):
            for name in row.names.split():
                value = getattr(settings, name, None)
                if row.when.holds(value, settings):
                    yield name, value, row


def _given(name: str, value: Any) -> str:
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return flag_of_setting(name) + ("" if value is True else f" {words}")


def _explained(row: Refusal) -> str:
    return f"{row.reason}; {row.instead}" if row.instead else row.reason
