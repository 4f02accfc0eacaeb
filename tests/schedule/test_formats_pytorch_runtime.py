"""The CSV files of our schedules train a model in the runtime of torch.distributed.pipelining."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from megatron.zero_bubble.cli.schedule_command import main
from megatron.zero_bubble.schedule.formats import schedule_from_pytorch_csv
from tests.ranks import run_on_ranks

pytest.importorskip("torch.distributed.pipelining.schedules")

RANKS, MICROBATCHES, WIDTH, LAYERS = 2, 6, 8, 4
SCHEDULES = ("1f1b", "zb-h1", "zb-2p", "interleaved-1f1b", "interleaved-zb", "zb-v", "v-half", "v-min")
PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def make_layers() -> list[torch.nn.Module]:
    """Return the layers of the model, with the same weights on every call."""
    torch.manual_seed(1)
    return [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(LAYERS)]


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randn(2, 3 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(2))
    return inputs, targets


def documented_step() -> Callable[..., None]:
    """Return the function `torch_step` of docs/commands.md."""
    [example] = re.findall(r"```python\n([^`]*def torch_step.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict = {}
    exec(example, scope)
    return scope["torch_step"]


def train(rank: int, num_ranks: int, folder: Path) -> None:
    """Run one step under every schedule, and save the gradients of this rank's layers."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    step, found = documented_step(), {}
    for name in SCHEDULES:
        csv = folder / f"{name}.csv"
        placement = schedule_from_pytorch_csv(csv.read_text()).placement
        layers, each = make_layers(), LAYERS // placement.num_stages
        modules = {
            stage: torch.nn.Sequential(*layers[stage * each : (stage + 1) * each])
            for stage in placement.stages_of(rank)
        }
        step(csv, modules, placement.num_stages, MICROBATCHES, mse_loss, *make_batch())
        # Gradients of the layers of other ranks are None.
        found[name] = [[parameter.grad for parameter in layer.parameters()] for layer in layers]
    torch.save(found, folder / f"gradients{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gradients(tmp_path_factory) -> list[dict[str, list[list[torch.Tensor | None]]]]:
    """The gradients that each rank computed: for each schedule a list of layers, each a list of parameters."""
    folder = tmp_path_factory.mktemp("pytorch")
    size = ["--pipeline-size", str(RANKS), "--num-microbatches", str(MICROBATCHES)]
    for name in SCHEDULES:
        csv = ["--format", "pytorch", "--output", str(folder / f"{name}.csv")]
        assert main(["generate", "--schedule", name, *size, *csv]) == 0
    assert run_on_ranks(RANKS, train, (folder,), timeout=120) == 0
    return [torch.load(folder / f"gradients{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_model_without_a_pipeline(gradients, name):
    layers, (inputs, targets) = make_layers(), make_batch()
    for microbatch, target in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        mse_loss(torch.nn.Sequential(*layers)(microbatch), target).backward()
    for layer, *ranks in zip(layers, *(found[name] for found in gradients), strict=True):
        for parameter, *by_rank in zip(layer.parameters(), *ranks, strict=True):
            [gradient] = [one for one in by_rank if one is not None]
            assert parameter.grad is not None
            torch.testing.assert_close(gradient, parameter.grad / MICROBATCHES, rtol=0, atol=0)
