"""Runs trainings of the small script one after the other in the same processes. Started by `test_launch.py`."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron.zero_bubble as zb
from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.launch import Launch
from megatron.zero_bubble.launcher.launch import _current as current_launch


def main(plan: Path) -> None:
    """`plan` names each training's flags and, unless it is to have megatron-core's schedule, what `enable` is told."""
    sys.path[:0] = [str(Path(__file__).parent / "checkout"), str(Path(__file__).parents[2])]
    from tests.undone import counted_undos

    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    for name, (settings, flags) in json.loads(plan.read_text()).items():
        # Each training in process groups of its own: those of all together would have a thousand threads.
        store = dist.FileStore(str(plan.parent / f"{name}.store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        measures = settings is not None and settings.pop("measures", False)
        if settings is None:
            launch = Launch(LaunchFlags(zero_bubble_cpu=True))
        else:
            zb.enable(**settings, cpu=True)
        costs = measured_costs(plan.parent / f"{name}.{rank}.costs") if measures else contextlib.nullcontext()
        with counted_undos() as undone, costs:
            train(flags, plan.parent / f"{name}.{rank}.txt")
        if settings is not None:
            (plan.parent / f"{name}.{rank}.layers").write_text(json.dumps(layers_built()))
        (plan.parent / f"{name}.{rank}.undone").write_text(str(undone()))
        if settings is None:
            launch.close()
        else:
            zb.disable()
        gc.collect()  # the model holds some of the groups, and has cycles
        dist.destroy_process_group()


def layers_built() -> list[int]:
    """The layers of each chunk that the script's last model has on this rank."""
    launch = current_launch()
    assert launch is not None
    assert launch.session is not None
    return [len(chunk.module.decoder.layers) for chunk in launch.session.run._chunks]


@contextlib.contextmanager
def measured_costs(output: Path) -> Iterator[None]:
    """Measure the costs of the script's model before the script builds it, and write them to a file."""
    from megatron.zero_bubble.launcher.hooks import Call, Hook, InstalledHooks

    def measure(call: Call) -> Any:
        launch = current_launch()
        assert launch is not None
        assert launch.session is not None
        costs = launch.session.run.units.measured_costs(call, seconds=0)
        output.write_text(json.dumps(asdict(costs)))
        return call.proceed()

    hook = Hook("megatron.training.training", "setup_model_and_optimizer", (), "", measure)
    hooks = InstalledHooks([hook], "")
    yield
    hooks.restore()


def train(flags: list[str], output: Path) -> None:
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.training import pretrain
    from pretrain_small import data_provider, forward_step, model_provider

    with output.open("w") as file, contextlib.redirect_stdout(file):
        pretrain(model_provider, forward_step, data_provider, flags)
    mpu.destroy_model_parallel()
    unset_num_microbatches_calculator()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
