"""Under the launcher, `pretrain_hybrid.py` computes with every schedule and layout what it computes without.

A case is a line of `CASES`. They run with the Megatron that is on the path, from 0.18 on:

    PYTHONPATH=/path/to/Megatron-LM python -m pytest tests/megatrons/test_hybrid_models.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launcher.launched import launch

TRAINER = find_spec("megatron.training")
pytestmark = pytest.mark.skipif(
    TRAINER is None or find_spec("megatron.core.models.hybrid") is None,
    reason="there is no Megatron-LM with hybrid models on the path",
)

SHAPE = (
    *("--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--max-position-embeddings", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--transformer-impl", "local"),
    *("--distributed-backend", "gloo", "--use-cpu-initialization", "--no-masked-softmax-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-rope-fusion", "--no-bias-dropout-fusion"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--zero-bubble-cpu"),
)
TRAINING = (
    *("--train-iters", "4", "--lr", "1e-2", "--clip-grad", "0.5", "--eval-interval", "4", "--eval-iters", "1"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "120", "--num-workers", "0"),
    *("--log-interval", "1", "--ckpt-format", "torch_dist"),
)
LOCAL = "--spec megatron.zero_bubble.mcore.hybrid_spec stack_spec --hybrid-layer-pattern"
DEFERRING = "--spec tests.mcore.deferring_spec stack_spec --hybrid-layer-pattern"
"""With layers that defer W as Transformer Engine's do, where the configuration says so."""
BY_LAYER = "--zero-bubble-seed-by-layer"
UNCLIPPED = "--clip-grad 0"
"""Across layouts the order of adding up the norm differs, and nothing else."""
DRAWN = "--attention-dropout 0.1 --hidden-dropout 0.1"
H1, TWO_P = "--zero-bubble-schedule zb-h1", "--zero-bubble-schedule zb-2p"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather --disable-bias-linear "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
MAMBA = "--mamba-state-dim 16 --mamba-head-dim 8 --mamba-num-groups 2"
FURTHER = "--position-embedding-type rope"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
NEEDED = "--zero-bubble --zero-bubble-recompute planned --zero-bubble-memory-limit 0.7 --zero-bubble-profile-iters 1 2"
CHOSEN = "--zero-bubble --zero-bubble-profile-iters 1 2 --zero-bubble-vocabulary-parallel off"


@dataclass(frozen=True)
class HybridCase:
    """A training under a schedule of ours, and one to compare it with.

    Attributes:
        pattern: the model of both trainings: a spec and a pattern, and further flags of Megatron-LM.
        zero_bubble: the launcher's flags.
        like: the pattern of the other training, where it is another one.
        base: the launcher's flags of the other training; none for Megatron's own schedule in the same layout.
        rounding: largest relative difference of a number; 0 where they must be equal to the last printed digit.
        ranks: pipeline ranks.
    """

    pattern: str
    zero_bubble: str
    like: str = ""
    base: str = ""
    rounding: float = 0.0
    ranks: int = 2


CASES = {
    "zb-h1": HybridCase(f"{LOCAL} *-*-|*-*-", H1),
    "layers that defer W": HybridCase(f"{DEFERRING} *-*M|*-M- {MAMBA}", TWO_P),
    "uneven, with dropout": HybridCase(f"{LOCAL} *-*-*-|*- {DRAWN}", TWO_P),
    "without stages": HybridCase(f"{LOCAL} *-*-", H1),
    "the older flag": HybridCase(f"{LOCAL} *-*-".replace("layer-pattern", "override-pattern"), H1),
    "experts": HybridCase(f"{LOCAL} *E*-|*E {EXPERTS}", H1),
    "Mamba": HybridCase(f"{LOCAL} M*-M|M-*- {MAMBA}", TWO_P),
    "multi-token prediction": HybridCase(f"{LOCAL} *-*-|*-/*-/*- {FURTHER}", H1),
    "post-validation": HybridCase(f"{LOCAL} *-*-|*-*- --log-interval 2", f"{TWO_P} --zero-bubble-post-validation"),
    "full recomputation": HybridCase(f"{LOCAL} *-*-|*M*- {MAMBA} {FULL}", TWO_P),
    "recomputation where needed": HybridCase(f"{LOCAL} *-*-|*-*- {DRAWN}", NEEDED),
    "vocabulary shards": HybridCase(f"{LOCAL} *-*-|*-*-", f"{H1} --zero-bubble-vocabulary-parallel", rounding=1e-5),
    "a V": HybridCase(
        f"{LOCAL} *-*|-|*M|- {MAMBA} {DRAWN} {UNCLIPPED}",
        f"--zero-bubble-schedule zb-v {BY_LAYER}",
        like=f"{LOCAL} *-*-|*M- {MAMBA} {DRAWN} {UNCLIPPED}",
        base=f"{H1} {BY_LAYER}",
    ),
    "a V of a pattern without stages": HybridCase(
        f"{LOCAL} *-*-*- {UNCLIPPED}",
        f"--zero-bubble-schedule zb-v {BY_LAYER}",
        base=f"--zero-bubble-schedule 1f1b {BY_LAYER}",
    ),
    "a V with multi-token prediction": HybridCase(
        f"{LOCAL} *-*|-|*|-/*- {FURTHER} {UNCLIPPED}",
        f"--zero-bubble-schedule v-half {BY_LAYER}",
        like=f"{LOCAL} *-*-|*-/*- {FURTHER} {UNCLIPPED}",
        base=f"{H1} {BY_LAYER}",
    ),
    "interleaved": HybridCase(
        f"{LOCAL} *-|*-|*|- {UNCLIPPED}",
        f"--zero-bubble-schedule interleaved-zb {BY_LAYER}",
        like=f"{LOCAL} *-*-|*- {UNCLIPPED}",
        base=f"{H1} {BY_LAYER}",
    ),
    "a chosen layout": HybridCase(
        f"{LOCAL} *-*-*-- {DRAWN} {UNCLIPPED}",
        CHOSEN,
        like=f"{LOCAL} *-*-|*-- {DRAWN} {UNCLIPPED}",
        base=f"{H1} {BY_LAYER}",
    ),
    "a chosen V": HybridCase(
        f"{LOCAL} *-M-*-- {MAMBA} {UNCLIPPED}",
        f"{CHOSEN} --zero-bubble-placement v",
        like=f"{LOCAL} *-M-|*-- {MAMBA} {UNCLIPPED}",
        base=f"{H1} {BY_LAYER}",
    ),
    "four ranks": HybridCase(f"{LOCAL} *-|*-*|-|*", TWO_P, ranks=4),
    "four ranks in a V": HybridCase(
        f"{LOCAL} *-*-*-*-* {UNCLIPPED}",
        f"--zero-bubble-schedule zb-v --allow-padding-num-layers {BY_LAYER}",
        like=f"{LOCAL} *-|*-*|-*|-* {UNCLIPPED}",
        base=f"{H1} {BY_LAYER}",
        ranks=4,
    ),
}


class HybridTrainings:
    """Trainings of `pretrain_hybrid.py`, each of which runs when a test first asks for it."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], str] = {}

    def output(self, flags: str, ranks: int = 2) -> str:
        """What the ranks print."""
        if (flags, ranks) not in self._outputs:
            size = ("--pipeline-model-parallel-size", str(ranks))
            job = launch(ranks, script(), *SHAPE, *size, *TRAINING, *flags.split())
            assert job.status == 0, f"status {job.status}: {job.output[-2000:]}{job.errors[-6000:]}"
            self._outputs[flags, ranks] = job.output
        return self._outputs[flags, ranks]

    def norms(self, flags: str, ranks: int = 2) -> list[float]:
        """The norm of the gradients of every iteration."""
        return [float(norm) for norm in re.findall(r"grad norm: (\S+)", self.output(flags, ranks))]

    def losses(self, flags: str, ranks: int = 2) -> list[str]:
        """Losses and perplexities in the order in which they are printed."""
        return re.findall(r"(?:lm loss|mtp_\d loss|load_balancing_loss|loss PPL): (\S+)", self.output(flags, ranks))


def script() -> Path:
    """Megatron-LM's own script; a wheel has none, but a copy of the trainer, which `pretrain.py` calls."""
    assert TRAINER is not None
    assert TRAINER.origin is not None
    own = Path(TRAINER.origin).parents[2] / "pretrain_hybrid.py"
    return own if own.exists() else Path(__file__).with_name("pretrain.py")


@pytest.fixture(scope="module")
def trainings() -> HybridTrainings:
    return HybridTrainings()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_numbers_do_not_depend_on_the_schedule(trainings: HybridTrainings, case: HybridCase) -> None:
    ours = f"{case.pattern} {case.zero_bubble}", case.ranks
    base = f"{case.like or case.pattern} {case.base}", case.ranks
    losses, expected = trainings.losses(*ours), trainings.losses(*base)
    assert len(losses) == len(expected) >= 4
    if case.rounding:
        assert list(map(float, losses)) == pytest.approx(list(map(float, expected)), rel=case.rounding)
    else:
        assert losses == expected
    norms = trainings.norms(*base)
    assert norms
    assert trainings.norms(*ours) == (pytest.approx(norms, abs=2e-3) if case.rounding or case.base else norms)


@pytest.mark.parametrize("name", ["zb-h1", "layers that defer W", "Mamba", "experts"])
def test_w_of_all_linear_layers_is_deferred(trainings: HybridTrainings, name: str) -> None:
    case = CASES[name]
    said = trainings.output(f"{case.pattern} {case.zero_bubble}")
    [share] = re.findall(r"^ > W is deferred for (\S+)% of the weights", said, re.M)
    unsplit = set(re.findall(r"computed in B: \S+ \((\w+)\)", said))
    assert unsplit <= {"MambaMixer", "Conv1d", "TopKRouter"}
    assert (float(share) == 100.0) is not bool(unsplit)
    assert float(share) > 95.0


def test_a_chosen_layout_is_a_pattern_that_builds_it_again(trainings: HybridTrainings) -> None:
    case = CASES["a chosen layout"]
    said = trainings.output(f"{case.pattern} {case.zero_bubble}")
    assert re.search(r"^ > layout chosen for 2 ranks and 8 microbatches$", said, re.M)
    [flags] = re.findall(r"^     the same layout in another run: (.*)$", said, re.M)
    pattern = re.findall(r"--hybrid-layer-pattern '(\S+?)'", flags)[0]
    assert pattern.replace("|", "") == "*-*-*--"
    assert f" > layers of each stage: {pattern.replace('|', ' | ')}\n" in said


def test_a_job_goes_on_from_its_checkpoint_in_the_layout_that_was_chosen(
    trainings: HybridTrainings, tmp_path: Path
) -> None:
    """With the losses of a job that goes on from the checkpoint of another layout, in which it had the same."""
    chosen = f"{LOCAL} *-*-*-- {UNCLIPPED} --train-iters 6 {CHOSEN} --zero-bubble-placement v"
    other = f"{LOCAL} *-*-|*-- {UNCLIPPED} --train-iters 6 {H1} {BY_LAYER}"
    saved, resumed = [], []
    for flags in (chosen, other):
        folder = tmp_path / str(len(saved))
        saved.append(f"{flags} --exit-interval 4 --save {folder} --save-interval 4")
        resumed.append(f"{flags} --load {folder}")
    assert trainings.losses(saved[0]) == trainings.losses(saved[1])
    assert trainings.losses(resumed[0]) == trainings.losses(resumed[1])
    assert len(trainings.losses(resumed[0])) > 2
    said = trainings.output(resumed[0])
    assert " > layout: that of the checkpoint in --load" in said
    layouts = [
        re.findall(r"^ > layers of each stage: (.*)$", text, re.M) for text in (trainings.output(saved[0]), said)
    ]
    assert layouts[0] == layouts[1] != []
