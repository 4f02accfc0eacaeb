"""A training ends at a value that is not finite, says where it is, and keeps the last good checkpoint the latest.

`make test` runs an example of each place where values are checked, in one start of two ranks. What is exhaustive finds
other values there, or on more ranks.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.changes import SpoiledGradient, SpoiledOutput, SpoiledUnusedWeight, SpoiledWeight
from tests.launch import TINY_GPT
from tests.trainings import Trainings

P2 = [
    *(*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "6"),
    *("--save-interval", "2", "--eval-interval", "3", "--eval-iters", "1", "--initial-loss-scale", "65536"),
]
H1 = ("--zero-bubble-schedule", "zb-h1")
# No step is undone: the forward steps that would be run again count, too.
POST = ("--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation", "--clip-grad", "1e6")
SHARDED = ("--overlap-grad-reduce", "--use-distributed-optimizer")
TRAIN_ON = "--no-check-for-nan-in-loss-and-grad"


def in_iteration(iteration: int, microbatch: int, chunks: int = 1) -> int:
    """The number of a forward step; a chunk has four in an iteration, and four in an evaluation after the third."""
    return 4 * chunks * (iteration - 1 + (iteration > 3)) + microbatch


LAST = in_iteration(5, 4)
"""The forward step of the last microbatch of iteration 5, by which the iteration before is settled."""
LAST_OF_TWO = in_iteration(5, 8, chunks=2)
GRADIENT = "the gradient of decoder.layers.2.mlp.linear_fc1.weight (inf) on rank 1"
SECOND_WEIGHT = "the weight decoder.layers.2.mlp.linear_fc1.weight (nan) on rank 1"
INTERLEAVED = ("--zero-bubble", "--zero-bubble-keep-layout", "--num-virtual-stages-per-pipeline-rank", "2")
BAD = {
    "megatron-core's: weight": ((SpoiledWeight(1, LAST),), SECOND_WEIGHT),
    "megatron-core's: loss": ((SpoiledOutput(1, LAST),), "the loss (inf) on rank 1"),
    "weight": ((*H1, SpoiledWeight(1, LAST)), SECOND_WEIGHT),
    "weight of the first rank": (
        (*H1, SpoiledWeight(0, LAST), SpoiledOutput(1, LAST)),
        "the weight decoder.layers.0.mlp.linear_fc1.weight (nan) on rank 0",
    ),
    "gradient, without clipping": ((*H1, "--clip-grad", "0", SpoiledGradient(1, LAST)), GRADIENT),
    "gradient, sharded": ((*H1, *SHARDED, "--bf16", SpoiledGradient(1, LAST)), GRADIENT),
    "post-validation: weight": ((*POST, SpoiledWeight(1, LAST)), SECOND_WEIGHT),
    "post-validation: gradient": ((*POST, "--bf16", SpoiledGradient(1, LAST)), GRADIENT),
    "post-validation: loss": ((*POST, SpoiledOutput(1, LAST)), "the loss (inf) on rank 1"),
    "interleaved: weight": (
        (*INTERLEAVED, SpoiledWeight(1, LAST_OF_TWO)),
        "the weight decoder.layers.3.mlp.linear_fc1.weight (nan) on rank 1",
    ),
    "V: gradient": (("--zero-bubble-schedule", "zb-v", SpoiledGradient(1, LAST_OF_TWO)), GRADIENT),
    "V: loss": (("--zero-bubble-schedule", "zb-v", SpoiledOutput(0, LAST_OF_TWO)), "the loss (inf) on rank 0"),
    "fp16, constant scale": ((*H1, "--fp16", "--loss-scale", "128", SpoiledGradient(1, LAST)), GRADIENT),
    "fp16, constant scale, post-validation": (
        (*POST, "--fp16", "--loss-scale", "128", SpoiledGradient(1, LAST)),
        GRADIENT,
    ),
}
"""Flags, and what is found."""
UNTIED = "--untie-embeddings-and-output-weights"
OTHERS = {
    "unused weight": (*H1, UNTIED, SpoiledUnusedWeight(0, in_iteration(3, 1))),
    "evaluation": (*H1, SpoiledWeight(0, in_iteration(3, 5))),
    "evaluation, trained on": (*H1, TRAIN_ON, SpoiledWeight(0, in_iteration(3, 5))),
    "infinite evaluation, trained on": (*H1, TRAIN_ON, *[SpoiledOutput(1, in_iteration(3, 5))]),
    "fp16, the scale adapts": (*H1, "--fp16", SpoiledGradient(0, LAST)),
}
REPLICAS = {
    "gradient": ((*H1, SpoiledGradient(3, LAST)), GRADIENT.replace("rank 1", "rank 3")),
    "gradient, sharded": ((*H1, *SHARDED, SpoiledGradient(3, LAST)), GRADIENT.replace("rank 1", "rank 3")),
    "megatron-core's: gradient": ((SpoiledGradient(3, LAST),), GRADIENT.replace("rank 1", "rank 3")),
    "loss": ((*H1, SpoiledOutput(3, LAST)), "the loss (inf) on rank 3"),
    "post-validation": ((*POST, SpoiledGradient(2, LAST)), GRADIENT.replace("rank 1", "rank 2")),
}


QUICK = ("post-validation: gradient", "gradient, sharded")


class Ends:
    """Output and checkpoints of trainings on two ranks, and on four with two replicas. Each runs when asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        replicas = {f"replicas: {name}": ("--global-batch-size", "8", *flags) for name, (flags, _) in REPLICAS.items()}
        self._jobs = [
            self._job(2, {name: flags for name, (flags, _) in BAD.items()} | OTHERS),
            self._job(4, replicas),
        ]

    def _job(self, num_ranks: int, trainings: dict[str, tuple[str, ...]]) -> Trainings:
        folder = self._root / f"{num_ranks} ranks"
        folder.mkdir()
        common = [*P2, "--valid-data-path", str(folder / "corpus")]
        plan = {name: [*common, *flags, "--save", str(self._root / name)] for name, flags in trainings.items()}
        return Trainings(num_ranks, plan, folder, unlogged=tuple(plan))

    def printed(self, training: str) -> str:
        return self._jobs[training.startswith("replicas: ")].printed(training)

    def reasons(self, training: str) -> list[str]:
        """Why the ranks ended: one line if they agree."""
        return re.findall(r"^ended: (.*)$", self.printed(training), flags=re.MULTILINE)

    def latest(self, training: str) -> int:
        """The iteration of the latest checkpoint."""
        return int((self._root / training / "latest_checkpointed_iteration.txt").read_text())


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return Ends(tmp_path_factory.mktemp("finite"))


def line(occasion: str, found: str) -> str:
    return (
        f"{occasion}: {found} is not finite: the training ends before this changes parameters or a checkpoint; "
        "to continue in spite of it, give --no-check-for-nan-in-loss-and-grad"
    )


ALL = [(name, found) for name, (_, found) in BAD.items()]
ALL += [(f"replicas: {name}", found) for name, (_, found) in REPLICAS.items()]


@pytest.mark.parametrize(
    ("training", "found"),
    [pytest.param(name, found, marks=() if name in QUICK else pytest.mark.exhaustive, id=name) for name, found in ALL],
)
def test_a_value_that_is_not_finite_ends_the_training_before_its_step(ends: Ends, training: str, found: str) -> None:
    assert ends.reasons(training) == [line("iteration 5", found)]
    assert re.findall(r"\] iteration +(\d+)/", ends.printed(training)) == ["1", "2", "3", "4"]
    assert ends.latest(training) == 4


def test_no_checkpoint_is_made_of_a_weight_that_no_loss_shows(ends: Ends) -> None:
    found = "the weight embedding.word_embeddings.weight (nan) on rank 0"
    assert ends.reasons("unused weight") == [line("checkpoint of iteration 4", found)]
    assert ends.latest("unused weight") == 2


@pytest.mark.exhaustive
def test_an_evaluation_that_is_not_finite_ends_the_training(ends: Ends) -> None:
    found = "the weight decoder.layers.0.mlp.linear_fc1.weight (nan) on rank 0"
    assert ends.reasons("evaluation") == [line("validation at iteration 3", found)]
    assert "validation loss" not in ends.printed("evaluation")
    assert ends.latest("evaluation") == 2


@pytest.mark.parametrize(
    ("training", "value"),
    [("evaluation", "NAN"), pytest.param("infinite evaluation", "INF", marks=pytest.mark.exhaustive)],
)
def test_a_perplexity_is_never_finite_where_its_loss_is_not(ends: Ends, training: str, value: str) -> None:
    text = ends.printed(f"{training}, trained on")
    assert f" validation loss at iteration 3 | lm loss value: {value} | lm loss PPL: {value} | " in text
    assert "] iteration        6/" in text
    assert ends.latest(f"{training}, trained on") == 6


@pytest.mark.exhaustive
def test_a_loss_scale_that_adapts_skips_the_step(ends: Ends) -> None:
    """Under an adapting loss scale nothing checks for finite values, as in Megatron-LM."""
    text = ends.printed("fp16, the scale adapts")
    skipped = dict(re.findall(r"\] iteration +(\d+)/.* number of skipped iterations: +(\d+)", text))
    assert skipped == {"1": "0", "2": "0", "3": "0", "4": "0", "5": "1", "6": "0"}
    assert ends.latest("fp16, the scale adapts") == 6
