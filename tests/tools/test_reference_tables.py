"""The generated tables of the reference have every setting that a schedule refuses or handles, and every hook."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.cpu_hooks import cpu_hooks
from megatron.zero_bubble.launcher.hook_table import ScriptHooks
from megatron.zero_bubble.launcher.launch import SUPPORTED
from megatron.zero_bubble.mcore.refused_settings import REFUSALS
from tests.launch import ROOT
from tools.megatron_settings import recorded
from tools.reference_tables import TABLES, main, with_tables
from tools.setting_groups import Effect, effects

SETTINGS, HOOKS = (TABLES[name]() for name in ("settings", "hooks"))


def test_every_refused_and_handled_setting_has_a_row() -> None:
    flags = {name: flag for names in recorded().values() for flag, name in names.flags.items()}
    shown = {*re.findall(r"`([^`]+)`", SETTINGS)}
    handled = [name for name, effect in effects() if effect is Effect.HANDLED]
    for name in (*handled, *(name for row in REFUSALS for name in row.names.split())):
        spellings = {flag for names in recorded().values() for flag, setting in names.flags.items() if setting == name}
        assert shown & ({name} if name not in flags else spellings), name


def test_every_refusal_gives_its_reason_and_its_alternative() -> None:
    for row in REFUSALS:
        assert f"| {row.reason} | {row.instead} |" in SETTINGS


def test_every_function_of_the_launcher_has_a_row_with_its_reason_and_versions() -> None:
    session = ScriptHooks(LaunchFlags(zero_bubble_post_validation=True, hierarchical_sgd="2:2"))
    lines = HOOKS.splitlines()
    for needed in (*session.hooks(), *session.needed(), *cpu_hooks(ExitStack())):
        [line] = [line for line in lines if f"`{needed.target}`" in line]
        versions = f" ({needed.version_range})" if needed.version_range else ""
        assert line.endswith(f"| {needed.reason}{versions} |")
        assert {needed.since, needed.until} <= {"", *SUPPORTED}


@pytest.mark.parametrize(
    ("function", "flags"),
    [
        ("megatron.core.pipeline_parallel.schedules.get_forward_backward_func", "every schedule"),
        (
            "megatron.core.optimizer.optimizer.ChainedOptimizer.step",
            "`--zero-bubble-post-validation`, `--hierarchical-sgd`",
        ),
        ("megatron.training.training.training_log", "`--hierarchical-sgd`"),
        ("megatron.training.initialize.initialize_megatron", "`--zero-bubble-cpu`"),
        ("megatron.core.optimizer.optimizer.MegatronOptimizer.prepare_grads", "`--zero-bubble-post-validation`"),
    ],
)
def test_a_function_names_the_flags_that_need_it(function: str, flags: str) -> None:
    assert f"`{function}` | {flags} |" in HOOKS


def test_the_pages_of_the_site_have_the_tables() -> None:
    for page, table in (("megatron_settings", SETTINGS), ("hooks", HOOKS)):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        assert table not in text
        assert table in with_tables(text)
    with pytest.raises(KeyError):
        with_tables("<!-- table: others -->\n")


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("hooks") == 0
    assert capsys.readouterr().out == HOOKS
    assert main("others") == 2
