"""Every kind of parallelism under every kind of schedule, with tied and untied embeddings, in fp32 and bf16.

`make test` runs the plain schedules of one cell of the matrix, which no other test covers. The other cells combine the
same parts and are exhaustive, as is ZB-V in all of them, which `test_v_placement.py` runs. A cell has six short
trainings. Plain schedules are compared with megatron-core's own byte for byte; ZB-V, which places layers
elsewhere, starts from weights of megatron-core's and must reach the losses and parameters that megatron-core reaches,
without clipping (the order in which a norm is summed differs) and dropout (drawn rank by rank).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from tests.comparison import differences, losses, tensors
from tests.launch import TINY_GPT, Trainings


class Layout(NamedTuple):
    num_ranks: int
    flags: tuple[str, ...]


PP2 = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "4000")
DISTRIBUTED_AND_OVERLAP = (*OVERLAP, "--use-distributed-optimizer", "--overlap-param-gather")
LAYOUTS = {
    "tp2-pp2": Layout(4, (*PP2, "--tensor-model-parallel-size", "2")),
    "tp2-sp-pp2": Layout(4, (*PP2, "--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "pp2-dp2": Layout(4, PP2),
    "pp2-dp2-distributed-optimizer": Layout(4, (*PP2, "--use-distributed-optimizer")),
    "pp2-dp4-two-instances": Layout(8, (*PP2, "--num-distributed-optimizer-instances", "2", *DISTRIBUTED_AND_OVERLAP)),
    "pp2-dp2-overlap-grad-reduce": Layout(4, (*PP2, *OVERLAP)),
    "pp2-dp2-overlap-both": Layout(4, (*PP2, *DISTRIBUTED_AND_OVERLAP)),
    "pp4": Layout(4, ("--pipeline-model-parallel-size", "4", "--global-batch-size", "8", "--num-layers", "8")),
    "tp2-pp2-dp2": Layout(8, (*PP2, "--tensor-model-parallel-size", "2", *OVERLAP)),
}
EMBEDDINGS = {"tied": (), "untied": ("--untie-embeddings-and-output-weights",)}
PRECISIONS = {"fp32": (), "bf16": ("--bf16",)}
PLAIN = ("zb-h1", "zb-2p")
IN_MAKE_TEST = {("pp2-dp2-overlap-both", "untied", "bf16")}
EXACT = ("--clip-grad", "0", "--attention-dropout", "0", "--hidden-dropout", "0", "--lr-decay-style", "constant")


def trainings(folder: Path, flags: tuple[str, ...]) -> dict[str, list[str]]:
    common = [*TINY_GPT, *flags]
    plain = [*common, "--train-iters", "4", "--clip-grad", "0.5"]
    exact = [*common, *EXACT]

    def saving(name: str, until: int, *more: str) -> list[str]:
        return [*exact, "--train-iters", str(until), "--save", str(folder / name), *more]

    return {
        "base": plain,
        "zb-h1": [*plain, "--zero-bubble-schedule", "zb-h1"],
        "zb-2p": [*plain, "--zero-bubble-schedule", "zb-2p"],
        "start": saving("start", 1),
        "1f1b": saving("1f1b", 2, "--load", str(folder / "start"), "--finetune"),
        "zb-v": saving("zb-v", 2, "--load", str(folder / "start"), "--finetune", "--zero-bubble-schedule", "zb-v"),
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(cell, id="-".join(cell), marks=() if cell in IN_MAKE_TEST else pytest.mark.exhaustive)
        for cell in product(LAYOUTS, EMBEDDINGS, PRECISIONS)
    ],
)
def cell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """The trainings of one combination of layout, embeddings and precision."""
    layout, embeddings, precision = request.param
    folder = tmp_path_factory.mktemp("cell")
    num_ranks, flags = LAYOUTS[layout]
    plan = trainings(folder, (*flags, *EMBEDDINGS[embeddings], *PRECISIONS[precision]))
    together = ("base", *PLAIN) if request.param in IN_MAKE_TEST else tuple(plan)
    return Trainings(num_ranks, plan, folder, together=together)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of this one process, without which megatron-core reads no checkpoint."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", PLAIN)
def test_numerics_equal_megatron_core(cell: Trainings, schedule: str) -> None:
    assert cell.numerics(schedule) == cell.numerics("base")


@pytest.mark.exhaustive
def test_a_v_gives_the_losses_and_parameters_of_1f1b(cell: Trainings) -> None:
    cell.run("start", "1f1b", "zb-v")
    folder = cell.folder
    assert losses(folder, "zb-v") == losses(folder, "1f1b")
    ours, theirs = (
        {key: value for key, value in tensors(folder, name, 2).items() if not key.startswith("optimizer.")}
        for name in ("zb-v", "1f1b")
    )
    assert differences(ours, theirs) == []
    before = tensors(folder, "start", 1)
    assert any(not before[key].equal(value) for key, value in ours.items()), "training changes them"
