"""Runs `zero-bubble schedule` in the process of the test."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.cli.schedule_command import main


@pytest.fixture
def run(capsys):
    """Run the tool in this process: (status, output, errors)."""

    def run(*words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def ok(run):
    def ok(*words):
        status, output, errors = run(*words)
        assert (status, errors) == (0, "")
        return output

    return ok
