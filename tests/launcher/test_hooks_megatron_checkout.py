"""A checkout of Megatron-LM has what the launcher relies on: `MEGATRON_CHECKOUT` is its folder.

It need not be of a supported version. `.github/workflows/megatron.yml` looks so at the branches main and dev.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatron.zero_bubble.launcher.hooks import Needed, minor_version
from megatron.zero_bubble.launcher.launch import SUPPORTED
from tests.launcher.megatron_functions import Source, find, imported, tables

CHECKOUT = os.environ.get("MEGATRON_CHECKOUT")
if CHECKOUT is None:
    pytest.skip("MEGATRON_CHECKOUT names no checkout of Megatron-LM", allow_module_level=True)
SOURCES = [Source(Path(CHECKOUT))]


def version() -> str:
    """The version of the checkout's megatron-core; a newer one than is supported counts as the newest supported one."""
    text = Path(CHECKOUT, "megatron", "core", "package_info.py").read_text()
    major, minor = (re.findall(rf"^{name} = (\d+)", text, re.M)[0] for name in ("MAJOR", "MINOR"))
    found = minor_version(f"{major}.{minor}.0")
    return found if found in SUPPORTED else SUPPORTED[-1]


@pytest.mark.parametrize("needed", tables(), ids=lambda needed: needed.target)
def test_the_checkout_has_every_function_of_the_tables_with_its_parameters(needed: Needed):
    if not needed.applies_to(version()):
        pytest.skip(f"not of {version()}")
    parameters = find(SOURCES, needed.target)
    assert parameters is not None
    assert set(needed.parameters) <= set(parameters)


def test_the_checkout_has_everything_that_is_imported():
    assert [name for name in sorted(imported()) if find(SOURCES, name) is None] == []
