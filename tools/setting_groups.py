"""Classifies every setting of Megatron by its effect on a zero-bubble schedule; `setting_groups.txt` has the groups."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from megatron.zero_bubble.mcore.refused_settings import REFUSALS, Refusal


class Effect(Enum):
    """The effect of a setting on a zero-bubble schedule."""

    RUN = "works, and was run"
    """Trained on CPUs with the numbers of megatron-core's own schedule."""
    READ = "works, as the sources say"
    """Changes the computation of a step in a way that no schedule notices. It has not been run."""
    HANDLED = "handled"
    """This project reads the setting, or has its effect in another way."""
    REFUSED = "refused"
    NONE = "without effect"
    """Says nothing about forward, backward and the optimizer's step, or only together with a refused setting."""


class SettingGroup(NamedTuple):
    """Settings that have the same effect for the same reason: what is done with them, or why nothing has to be."""

    effect: Effect
    title: str
    reason: str
    names: list[str]


def _read() -> tuple[list[SettingGroup], tuple[str, ...]]:
    """Return the groups of the file, and the beginnings of the names of classes without effect."""
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
    """Tell whether a row refuses its settings with every schedule, whenever they are on."""
    return not row.features and not row.when.words


def effects() -> Iterator[tuple[str, Effect]]:
    """Yield every setting's name with its effect.

    A name occurs once in a correct table. A setting that is refused with some features or values only has the effect
    that it has without them.
    """
    for row in REFUSALS:
        if is_unconditional(row):
            yield from ((name, Effect.REFUSED) for name in row.names.split())
    for group in GROUPS:
        yield from ((name, group.effect) for name in group.names)
