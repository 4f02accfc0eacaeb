"""The kinds of rows in the table of Megatron's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


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


class Feature(Enum):
    """A feature of this project with which a setting may be refused that works otherwise, as a user asks for it."""

    POST_VALIDATION = "--zero-bubble-post-validation"
    SCRIPT_POST_VALIDATION = "--zero-bubble-post-validation under the launcher"
    HIERARCHICAL_SGD = "--hierarchical-sgd"
    VOCABULARY_SHARDS = "--zero-bubble-vocabulary-parallel on"
    PLANNED_RECOMPUTATION = "--zero-bubble-recompute planned"
    OFFLOAD = "--zero-bubble-offload auto"
    LAYER_SEEDS = "--zero-bubble-seed-by-layer"
    V_PLACEMENT = "a V placement (zb-v, v-half, v-min)"


@dataclass(frozen=True)
class SettingGroup:
    """Settings that have the same effect for the same reason.

    Attributes:
        effect: any but `Effect.REFUSED`.
        title: what the settings are about.
        reason: what is done with them, or why nothing has to be.
        names: the names of configuration fields and of Megatron-LM's arguments, separated by white space.
    """

    effect: Effect
    title: str
    reason: str
    names: str


def is_on(value: Any, settings: object) -> bool:
    """Tell whether a setting with this value is switched on."""
    return bool(value) and value != "none"


@dataclass(frozen=True)
class Refusal:
    """Settings that are refused for the same reason.

    Attributes:
        names: as in `SettingGroup`.
        reason: why, in words that follow a colon.
        instead: what works, in words that follow a semicolon; empty if the setting can only be left out.
        features: with which features they are refused; with every zero-bubble schedule if there are none.
        condition: for which values or together with what they are refused, in words; empty if always.
        when: whether they are refused, from the value and an object with all settings as attributes.
    """

    names: str
    reason: str
    instead: str = ""
    features: tuple[Feature, ...] = ()
    condition: str = ""
    when: Callable[[Any, Any], bool] = is_on

    @property
    def is_unconditional(self) -> bool:
        return not self.features and not self.condition
