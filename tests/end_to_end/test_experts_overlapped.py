"""Pairs of a forward and a backward, experts on two ranks each: the numbers are those of the schedule without pairs.

Dropout is on, the loss of the experts' balance too. Exhaustive are precision, shared experts, one expert a rank,
optimizers whose messages overlap and tensor parallelism, and a prediction layer, which `test_deepseek_v3.py` has too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.experts import OVERLAP, pairs_in_a_file
from tests.launch import TINY_GPT
from tests.trainings import Trainings

EXPERTS = (
    *TINY_GPT[2:],
    *("--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2", "--num-layers", "4"),
    *("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "0.01"),
    *("--disable-bias-linear", "--global-batch-size", "16", "--train-iters", "5", "--clip-grad", "0.5"),
    *("--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
)
UNPROFILED = ("--zero-bubble-profile-iters", "0", "0")
TWO_CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
SEEDED = ("--zero-bubble-seed-by-layer", "--mtp-num-layers", "1", "--untie-embeddings-and-output-weights")
DENSE_LAST = ("--moe-layer-freq", "[1,1,1,0]")
OVERLAPPED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--bf16")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1")
SHARED = ("--moe-shared-expert-intermediate-size", "16", "--moe-layer-freq", "[0,1,1,1]", "--bf16")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("experts")
    given = pairs_in_a_file(folder)

    def with_schedule(*words: str) -> Sequence[str]:
        # While costs are measured nothing runs in pairs.
        return (*EXPERTS, *UNPROFILED, "--zero-bubble-schedule", *words)

    flags: dict[str, Sequence[str]] = {
        "megatron-core": EXPERTS,
        "pairs": with_schedule(given, OVERLAP),
        "no pairs": with_schedule("zb-h1", OVERLAP),
        "planned": with_schedule("auto", "--zero-bubble-profile-iters", "2", "3", OVERLAP),
        "post-validated": with_schedule(given, OVERLAP, "--zero-bubble-post-validation"),
        "megatron-core, two chunks": (*EXPERTS, *TWO_CHUNKS),
        "interleaved-pairs": with_schedule("interleaved-pairs", *TWO_CHUNKS, OVERLAP),
        "zb-v": with_schedule("zb-v"),
        "dualpipe-v": with_schedule("dualpipe-v", OVERLAP),
        "megatron-core, an expert a rank": (*EXPERTS, "--num-experts", "2"),
        "pairs, an expert a rank": (*with_schedule(given, OVERLAP), "--num-experts", "2"),
        "megatron-core, shared": (*EXPERTS, *SHARED),
        "pairs, shared": (*with_schedule(given, OVERLAP), *SHARED),
        "megatron-core, seeds and prediction": (*EXPERTS, *SEEDED),
        "pairs, seeds and prediction": (*with_schedule(given, OVERLAP), *SEEDED),
        "megatron-core, dense last": (*EXPERTS, *DENSE_LAST),
        "pairs, dense last": (*with_schedule(given, OVERLAP), *DENSE_LAST),
        "megatron-core, overlapped": (*EXPERTS, *OVERLAPPED),
        "pairs, overlapped": (*with_schedule(given, OVERLAP), *OVERLAPPED),
    }
    return Trainings(4, flags, folder)


@pytest.mark.parametrize(
    ("training", "base"),
    [
        ("pairs", "megatron-core"),
        ("planned", "megatron-core"),
        ("interleaved-pairs", "megatron-core, two chunks"),
        ("dualpipe-v", "zb-v"),
        pytest.param("no pairs", "megatron-core", marks=pytest.mark.exhaustive),
        pytest.param("post-validated", "megatron-core", marks=pytest.mark.exhaustive),
        pytest.param("pairs, an expert a rank", "megatron-core, an expert a rank", marks=pytest.mark.exhaustive),
        pytest.param("pairs, shared", "megatron-core, shared", marks=pytest.mark.exhaustive),
        pytest.param(
            "pairs, seeds and prediction", "megatron-core, seeds and prediction", marks=pytest.mark.exhaustive
        ),
        ("pairs, dense last", "megatron-core, dense last"),
        pytest.param("pairs, overlapped", "megatron-core, overlapped", marks=pytest.mark.exhaustive),
    ],
)
def test_numbers_are_those_without_pairs(trainings: Trainings, training: str, base: str) -> None:
    trainings.run(training, base)
    assert trainings.numerics(training) == trainings.numerics(base)


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_compute_what_they_do_without_pairs(tmp_path: Path) -> None:
    """With sequence parallelism, whose layers draw from a random state of their own."""
    pairs = ("--zero-bubble-schedule", pairs_in_a_file(tmp_path), OVERLAP)
    trainings = Trainings(8, {"megatron-core": (*EXPERTS, *TENSOR), "pairs": (*EXPERTS, *TENSOR, *pairs)}, tmp_path)
    assert trainings.numerics("pairs") == trainings.numerics("megatron-core")
