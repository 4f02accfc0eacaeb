"""Under the launcher, `pretrain_hybrid.py` computes with every schedule and layout what it computes without.

A case is a line of `CASES`. They run with the Megatron that is on the path, from 0.18 on. `make test-megatron` runs
those in `QUICK`, and with `FLAGS='-m ""'` all of them; the others are combinations of the same parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.megatrons.megatron_trainings import MegatronTrainings, needs_hybrid_model, needs_trainer

pytestmark = [needs_trainer, needs_hybrid_model]

FLAGS = ("--global-batch-size", "8", "--train-iters", "4", "--eval-interval", "4")
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
DELTA = "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4 --swiglu"
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 12 --position-embedding-type rope"
)
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
    "gated delta nets": HybridCase(f"{LOCAL} *-G-|G-*- {DELTA}", TWO_P),
    "latent attention": HybridCase(f"{LOCAL} +-M|+- {MAMBA} {LATENT}", TWO_P),
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


QUICK = ("zb-h1", "Mamba", "multi-token prediction", "a V", "a chosen layout")


def cases(*names: str) -> list[Any]:
    return [pytest.param(CASES[name], id=name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in names]


@pytest.fixture(scope="module")
def trainings() -> MegatronTrainings:
    return MegatronTrainings(FLAGS)


@pytest.mark.parametrize("case", cases(*CASES))
def test_the_numbers_do_not_depend_on_the_schedule(trainings: MegatronTrainings, case: HybridCase) -> None:
    ours = f"{case.pattern} {case.zero_bubble}", case.ranks
    base = f"{case.like or case.pattern} {case.base}", case.ranks
    losses, expected = trainings.losses(*ours), trainings.losses(*base)
    assert len(losses) == len(expected) >= 4
    if case.rounding:
        assert list(map(float, losses)) == pytest.approx(list(map(float, expected)), rel=case.rounding)
    else:
        assert losses == expected
    norms, expected = trainings.norms(*ours), trainings.norms(*base)
    assert expected
    if case.rounding or case.base:
        assert list(map(float, norms)) == pytest.approx(list(map(float, expected)), abs=2e-3)
    else:
        assert norms == expected


@pytest.mark.parametrize("case", cases("zb-h1", "layers that defer W", "Mamba", "experts"))
def test_w_of_all_linear_layers_is_deferred(trainings: MegatronTrainings, case: HybridCase) -> None:
    said = trainings.output(f"{case.pattern} {case.zero_bubble}")
    [share] = re.findall(r"^ > W is deferred for (\S+)% of the weights", said, re.M)
    unsplit = set(re.findall(r"computed in B: \S+ \((\w+)\)", said))
    assert unsplit <= {"MambaMixer", "Conv1d", "TopKRouter"}
    assert (float(share) == 100.0) is not bool(unsplit)
    assert float(share) > 95.0


def test_a_chosen_layout_is_a_pattern_that_builds_it_again(trainings: MegatronTrainings) -> None:
    case = CASES["a chosen layout"]
    said = trainings.output(f"{case.pattern} {case.zero_bubble}")
    assert re.search(r"^ > layout chosen for 2 ranks and 8 microbatches$", said, re.M)
    [flags] = re.findall(r"^     the same layout in another run: (.*)$", said, re.M)
    pattern = re.findall(r"--hybrid-layer-pattern '(\S+?)'", flags)[0]
    assert pattern.replace("|", "") == "*-*-*--"
    assert f" > layers of each stage: {pattern.replace('|', ' | ')}\n" in said


@pytest.mark.exhaustive
def test_a_job_goes_on_from_its_checkpoint_in_the_layout_that_was_chosen(
    trainings: MegatronTrainings, tmp_path: Path
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
