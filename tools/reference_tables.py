"""Prints reference tables that are made from the package; `make docs` inserts the tables into pages of the site.

python -m tools.reference_tables settings  Megatron's settings that a schedule refuses or handles
python -m tools.reference_tables hooks     the functions that the launcher replaces and calls
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.cpu_hooks import cpu_hooks
from megatron.zero_bubble.launcher.hook_table import ScriptHooks
from megatron.zero_bubble.launcher.hooks import Needed
from megatron.zero_bubble.launcher.script_steps import needed_for_post_validation
from megatron.zero_bubble.mcore.refusals import flag_of_setting
from megatron.zero_bubble.mcore.refused_settings import WITH_EVERY_SCHEDULE, WITH_FEATURES, Refusal
from tools.megatron_settings import SettingNames, recorded
from tools.setting_groups import GROUPS, Effect, effects

_POST_VALIDATION, _REPLICAS = "`--zero-bubble-post-validation`", "`--hierarchical-sgd`"


def settings_tables(versions: Mapping[str, SettingNames]) -> str:
    """Return tables of Megatron's settings: the refused and handled settings, and the number with each status.

    Args:
        versions: version -> names of the settings, from which the flag of each setting is taken.
    """
    flags = _flags_of_settings(versions)
    counts = Counter(effect for _, effect in effects())
    handled = [
        f"| {group.title} | {group.reason} | {_names(group.names, flags)} |"
        for group in GROUPS
        if group.effect is Effect.HANDLED
    ]
    parts = [
        _table(("settings", "status"), (f"| {counts[each]} | {each.value} |" for each in Effect)),
        "## Refused with every schedule",
        _table(("setting", "why", "instead"), (_refusal(row, flags) for row in WITH_EVERY_SCHEDULE)),
        "## Refused with a feature",
        "Without the feature these settings work.",
        _table(
            ("setting", "refused with", "why", "instead"),
            (
                _refusal(row, flags, ", ".join(map(_code, (each.value for each in row.features))))
                for row in WITH_FEATURES
            ),
        ),
        "## Handled",
        _table(("", "handling", "settings"), handled),
    ]
    return "\n\n".join(parts) + "\n"


def hook_tables() -> str:
    """Return tables of the Megatron functions that the launcher replaces and calls, and the flags that need each."""
    asked: dict[str, list[str]] = {}
    replaced: dict[str, Needed] = {}
    for title, flags in (
        ("every schedule", LaunchFlags()),
        (_POST_VALIDATION, LaunchFlags(zero_bubble_post_validation=True)),
        (_REPLICAS, LaunchFlags(hierarchical_sgd="2:2")),
    ):
        for hook in ScriptHooks(flags).hooks():
            if "every schedule" not in asked.setdefault(hook.target, []):
                asked[hook.target].append(title)
            replaced[hook.target] = hook
    for hook in cpu_hooks(ExitStack()):
        asked[hook.target], replaced[hook.target] = ["`--zero-bubble-cpu`"], hook
    of_post_validation = list(needed_for_post_validation())
    needed = list(ScriptHooks(LaunchFlags()).needed())
    return (
        "\n\n".join(
            [
                "## Replaced functions",
                _functions((", ".join(asked[target]), hook) for target, hook in replaced.items()),
                "## Called functions",
                _functions(
                    [
                        *(("every schedule", each) for each in needed),
                        *((_POST_VALIDATION, each) for each in of_post_validation),
                    ]
                ),
            ]
        )
        + "\n"
    )


TABLES = {"settings": lambda: settings_tables(recorded()), "hooks": hook_tables}
"""Name in a comment `<!-- table: NAME -->` of a page -> function that makes the tables."""
_MARK = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def with_tables(markdown: str) -> str:
    """Replace marks such as `<!-- table: hooks -->` in the text of a page by tables.

    Raises:
        KeyError: the name in a mark is not in `TABLES`.
    """
    return _MARK.sub(lambda mark: TABLES[mark[1]](), markdown)


def _functions(rows: Iterable[tuple[str, Needed]]) -> str:
    """A table of functions; consecutive functions with the same explanation share a row."""

    def explanation(row: tuple[str, Needed]) -> tuple[str, str]:
        asked, needed = row
        versions = f" ({needed.version_range})" if needed.version_range else ""
        return asked, needed.reason + versions

    return _table(
        ("function", "with", "effect"),
        (
            f"| {' '.join(_code(needed.target) for _, needed in alike)} | {asked} | {reason} |"
            for (asked, reason), alike in groupby(rows, explanation)
        ),
    )


def _refusal(row: Refusal, flags: Mapping[str, str], features: str = "") -> str:
    names = f"{_names(row.names.split(), flags)} {row.when.words}".strip()
    return "| " + " | ".join([names, *([features] if features else []), row.reason, row.instead]) + " |"


def _table(heads: Sequence[str], rows: Iterable[str]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows])


def _names(names: Iterable[str], flags: Mapping[str, str]) -> str:
    return " ".join(_code(flags.get(name, name)) for name in names)


def _code(name: str) -> str:
    """A name as Markdown; a feature that is described in words is not changed."""
    return f"`{name}`" if " " not in name or name.startswith("--") else name


def _flags_of_settings(versions: Mapping[str, SettingNames]) -> dict[str, str]:
    """Setting -> flag of the setting in the newest version that has one."""
    flags: dict[str, str] = {}
    for names in versions.values():
        first: dict[str, str] = {}
        for flag, name in names.flags.items():
            if name not in first or flag == flag_of_setting(name):
                first[name] = flag
        flags.update(first)
    return flags


def main(*words: str) -> int:
    if len(words) != 1 or words[0] not in TABLES:
        print(__doc__, file=sys.stderr)
        return 2
    print(TABLES[words[0]](), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
