"""A script that cannot train ends in one line and a non-zero exit, and never hangs.

One mistake ends a process of its own. Those that take a running script end forked ranks, and are exhaustive.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import environment
from tests.launcher.launched import launch
from tests.launcher.script_trainings import CHECKOUT

FLAGS = ("--zero-bubble-cpu", "--zero-bubble-schedule", "zb-h1")


def error_of(status: int | None, errors: str) -> str:
    """The line that tells the mistake, of a process or job that ends by no other one."""
    assert status == 2, errors
    assert "Traceback" not in errors
    return only_error(errors)


def only_error(errors: str) -> str:
    (line,) = [line for line in errors.splitlines() if line.startswith("megatron.zero_bubble: error: ")]
    return line


@pytest.mark.exhaustive
def test_a_script_that_never_trains(tmp_path: Path) -> None:
    script = tmp_path / "prepare.py"
    script.write_text("import sys\nprint('done')\nsys.exit()\n")
    (tmp_path / "megatron").symlink_to(CHECKOUT / "megatron")
    job = launch(1, script, *FLAGS)
    assert job.output == "done\n"
    assert "without a training step" in error_of(job.status, job.errors)


MORE_LAYERS = """
from pretrain_small import data_provider, forward_step, get_args, model_provider, pretrain

def more_layers(*given, **named):
    get_args().num_layers += 2
    model = model_provider(*given, **named)
    get_args().num_layers -= 2
    return model

pretrain(more_layers, forward_step, data_provider)
"""


@pytest.mark.exhaustive
def test_a_script_that_builds_other_layers_than_it_was_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "more_layers.py"
    script.write_text(MORE_LAYERS)
    for name in ("megatron", "pretrain_small.py"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    job = launch(2, script, "--pipeline-model-parallel-size", "2", *FLAGS)
    assert "--num-layers 4, but stages of 3, 3 layers were built, 6 in all" in error_of(job.status, job.errors)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            "labels=labels, packed_seq_params=pack).mean()",
            "returns its output unchanged, but it computes with it",
            id="first rank",
        ),
        pytest.param(
            "labels=None, packed_seq_params=pack)", "the forward step must call the model with labels", id="last rank"
        ),
    ],
)
def test_a_script_whose_loss_is_not_per_token(tmp_path: Path, call: str, message: str) -> None:
    """The rank that finds the mistake says so in one line; the other may add that it has lost the first."""
    script = tmp_path / "other_loss.py"
    text = (CHECKOUT / "pretrain_small.py").read_text()
    assert text.count("labels=labels, packed_seq_params=pack)\n") == 1
    script.write_text(text.replace("labels=labels, packed_seq_params=pack)\n", f"{call}\n"))
    (tmp_path / "megatron").symlink_to(CHECKOUT / "megatron")
    flags = ("--pipeline-model-parallel-size", "2", *FLAGS, "--zero-bubble-vocabulary-parallel")
    job = launch(2, script, *flags)
    assert job.status != 0
    assert message in only_error(job.errors)


@pytest.mark.exhaustive
def test_a_model_that_sends_wider_messages_than_its_configuration_says() -> None:
    flags = ("--pipeline-model-parallel-size", "2", "--streams", "unsaid", *FLAGS)
    job = launch(2, CHECKOUT / "pretrain_small.py", *flags)
    assert job.status != 0
    assert "stage 0 sends a tensor of shape (16, 1, 64), but messages have (16, 1, 32)" in only_error(job.errors)


def test_another_version_of_megatron_core(tmp_path: Path) -> None:
    """The process is new: it imports another megatron-core. It shows as well how the command tells a mistake."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("__version__ = '0.9.0'\n")
    (tmp_path / "pretrain.py").write_text("print('not reached')\n")
    flags = (str(tmp_path / "pretrain.py"), "--zero-bubble-schedule", "zb-h1")
    command = [sys.executable, "-m", "megatron.zero_bubble", *flags]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    error = error_of(result.returncode, result.stderr)
    assert all(words in error for words in ("0.9.0", "0.16", str(core)))
    assert result.stdout == ""
