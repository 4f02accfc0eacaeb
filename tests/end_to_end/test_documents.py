"""Trainings on documents of different lengths: a schedule in the data's order gives megatron-core's numbers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.launch import TINY_GPT
from tests.trainings import Trainings

DOCUMENTS = (
    *(*TINY_GPT, "--variable-seq-lengths", "--seq-length", "64", "--micro-batch-size", "2"),
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "12"),
)
IN_DATA_ORDER = ("--zero-bubble-microbatch-order", "data")
TRAININGS = {
    "megatron-core": DOCUMENTS,
    "zb-h1": (*DOCUMENTS, "--zero-bubble-schedule", "zb-h1", *IN_DATA_ORDER),
    "auto": (*DOCUMENTS, "--zero-bubble", "--zero-bubble-keep-layout", *IN_DATA_ORDER),
    "planned order": (*DOCUMENTS, "--zero-bubble-schedule", "auto", "--zero-bubble-profile-iters", "1", "3"),
}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("documents")
    write_documents(folder / "corpus")
    return Trainings(2, TRAININGS, folder)


def write_documents(prefix: Path) -> None:
    """Write documents of 1 to 200 tokens, most of which are short."""
    generator = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in generator.lognormal(2.5, 1.0, 80).clip(1, 200).astype(int):
        builder.add_document(torch.from_numpy(generator.integers(0, 120, length)), [length])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("name", ["zb-h1", "auto"])
def test_numbers_are_megatron_cores(trainings: Trainings, name: str) -> None:
    assert trainings.numerics(name) == trainings.numerics("megatron-core")


def test_steps_are_planned_once_their_costs_are_measured(trainings: Trainings) -> None:
    """Until then the numbers are those of the data's order, and the losses of the next step still are."""
    lines = [line for line in trainings.printed("planned order").splitlines() if "lm loss" in line]
    said = [
        re.search(r"microbatch order: (\d\.\d\d) times as fast, planned in \d+\.\d ms, (?:not )?hidden", x)
        for x in lines
    ]
    assert [match is not None for match in said] == [False] * 3 + [True] * 7
    assert all(float(match[1]) >= 1.0 for match in said if match)
    ours, megatrons = (trainings.numerics(name).splitlines() for name in ("planned order", "megatron-core"))
    assert ours[:3] == megatrons[:3]
    assert len(ours) == len(megatrons) == 10
