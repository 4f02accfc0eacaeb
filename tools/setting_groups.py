"""Classifies Megatron's settings by their effect on a zero-bubble schedule; `setting_groups.txt` has the classes."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from megatron.zero_bubble.mcore.refused_settings import REFUSALS, Refusal


class Effect(Enum):
    """The effect of a setting on a zero-bubble schedule."""

    RUN = "works, and was run"
    """Training with the setting was run on CPUs, and gave the same numbers as megatron-core's own schedule."""
    READ = "works, as the sources say"
    """The setting changes the computation of a step, but not in a way that matters to a schedule. Training with the
    setting was not run."""
    HANDLED = "handled"
    """This project reads the setting, or obtains the effect of the setting in another way."""
    REFUSED = "refused"
    NONE = "without effect"
    """The setting does not affect forward, backward and optimizer step, or does so only together with a refused
    setting."""


class SettingGroup(NamedTuple):
    """Settings with the same effect and the same reason: how the settings are handled, or why they need no handling."""

    effect: Effect
    title: str
    reason: str
    names: list[str]


def _read() -> tuple[list[SettingGroup], tuple[str, ...]]:
    """Return the groups in the file, and the beginnings of the names of the classes whose settings have no effect."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    groups: list[SettingGroup] = []
    for part in text.split("\n[")[1:]:
        head, reason, names = part.split("\n", 2)
        effect, _, title = head.rstrip("]").partition(": ")
        if not title:
            return groups, tuple(names.split())
        groups.append(SettingGroup(Effect(effect), title, reason, names.split()))
    raise AssertionError("the file has no classes without effect")


GROUPS, CLASSES_WITHOUT_EFFECT = _read()


def is_unconditional(row: Refusal) -> bool:
    """Tell whether a row refuses its settings with every schedule and with every value that switches them on."""
    return not row.features and not row.when.words


def effects() -> Iterator[tuple[str, Effect]]:
    """Yield (name, effect) of every setting.

    In a correct table, each name occurs once. A setting that is refused only with some features or values has the
    effect that applies without these features or values.
    """
    for row in REFUSALS:
        if is_unconditional(row):
            yield from ((name, Effect.REFUSED) for name in row.names.split())
    for group in GROUPS:
        yield from ((name, group.effect) for name in group.names)
