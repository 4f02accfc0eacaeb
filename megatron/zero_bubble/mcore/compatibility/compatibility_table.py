"""The table of all settings of megatron-core and Megatron-LM, and the refusals that follow from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from megatron.zero_bubble.mcore.compatibility.refusals import REFUSALS
from megatron.zero_bubble.mcore.compatibility.setting_rows import Effect, Feature, Refusal
from megatron.zero_bubble.mcore.compatibility.settings_without_effect import CLASSES_WITHOUT_EFFECT, WITHOUT_EFFECT
from megatron.zero_bubble.mcore.compatibility.working_settings import WORKING

GROUPS = (*WORKING, *WITHOUT_EFFECT)
_FLAGS = {"fp8": "--fp8-format", "fp4": "--fp4-format", "logit_dtype": "--output-logit-dtype"}
"""Refused settings whose flag has another name."""


def flag_of_setting(name: str) -> str:
    """The flag of Megatron-LM that sets a refused setting, if there is one."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def effects() -> Iterator[tuple[str, Effect]]:
    """Yield every setting's name with its effect.

    A name occurs once in a correct table. A setting that is refused with some features or values only has the effect
    that it has without them.
    """
    for row in REFUSALS:
        if row.is_unconditional:
            yield from ((name, Effect.REFUSED) for name in row.names.split())
    for group in GROUPS:
        yield from ((name, group.effect) for name in group.names.split())


def is_class_without_effect(full_name: str) -> bool:
    """Tell whether no field of a configuration class has an effect on a schedule."""
    return any(full_name.startswith(prefix) for prefix in CLASSES_WITHOUT_EFFECT)


def refused_settings(
    settings: object, features: Collection[Feature] = ()
) -> Iterator[tuple[str, Any, Refusal, Feature | None]]:
    """Yield what is refused: the setting's name and value, the row of the table, and the feature that refuses it.

    Args:
        settings: an object with the settings as attributes; a version of Megatron may lack some.
        features: the features in use.
    """
    for row in REFUSALS:
        feature = next((feature for feature in row.features if feature in features), None)
        if row.features and feature is None:
            continue
        for name in row.names.split():
            value = getattr(settings, name, None)
            if row.when(value, settings):
                yield name, value, row, feature


def refuse_settings(settings: object, features: Collection[Feature], schedule: str) -> None:
    """Refuse the arguments of a script that a schedule or feature does not support.

    Raises:
        ValueError: there is one; the message has the flag, its value, the reason and what works instead.
    """
    for name, value, row, feature in refused_settings(settings, features):
        flag = flag_of_setting(name) + ("" if value is True else f" {value}")
        other = schedule if feature is None else feature.value
        text = f"{flag} does not work with {other}: {row.reason}"
        raise ValueError(f"{text}; {row.instead}" if row.instead else text)
