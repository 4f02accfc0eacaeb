"""Under the launcher, Megatron's own trainer computes with every schedule what it computes with its own.

`make test-megatron` runs this for each version. A case is a line of `CASES`; hybrid models are in
`test_hybrid_models.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.experts import OVERLAP, pairs_in_a_file
from tests.launch import run
from tests.megatrons.megatron_trainings import MegatronTrainings, losses, needs_trainer

pytestmark = needs_trainer

FLAGS = ("--global-batch-size", "4", "--train-iters", "6", "--eval-interval", "3", "--save-interval", "6")
GPT = "--num-layers 4"


@dataclass(frozen=True)
class Case:
    """A training under a schedule of ours, which is compared with one under Megatron's.

    Attributes:
        model: Megatron's flags, of both trainings.
        zero_bubble: the launcher's flags.
        base: the launcher's flags of the training to compare with; none for Megatron's own schedule.
        rounding: largest relative difference of a printed number; 0 where all numbers and parameters must be equal.
    """

    model: str
    zero_bubble: str
    base: str = ""
    rounding: float = 0.0


ZB_H1 = "--zero-bubble-schedule zb-h1"
SHARDS = f"{ZB_H1} --zero-bubble-vocabulary-parallel on"
BY_LAYER = "--zero-bubble-seed-by-layer"
"""Initial weights that do not depend on the layout."""
LENGTHS = f"{GPT} --varied-lengths --moe-token-dispatcher-type alltoall"
DATA_ORDER = "--zero-bubble-microbatch-order data"
ORDER_FREE = f"{LENGTHS} --optimizer sgd --hidden-dropout 0 --attention-dropout 0"
"""In another order of microbatches dropout draws other numbers, and Adam makes large steps of gradients near zero."""
PLANNED_ORDER = f"{ZB_H1} --zero-bubble-profile-iters 1 2"
BALANCED_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
CASES = {
    "zb-h1": Case(GPT, ZB_H1),
    "balanced experts": Case(f"{GPT} {BALANCED_EXPERTS}", ZB_H1),
    "zb-2p, post-validated": Case(
        f"{GPT} --log-interval 3", "--zero-bubble-schedule zb-2p --zero-bubble-post-validation"
    ),
    "planned": Case(GPT, "--zero-bubble --zero-bubble-keep-layout --zero-bubble-profile-iters 1 2"),
    "chosen layout": Case(
        GPT, f"--zero-bubble {BY_LAYER}", base=f"--zero-bubble-schedule 1f1b {BY_LAYER}", rounding=1e-4
    ),
    "chosen layout, bf16, reduction overlapped": Case(
        f"{GPT} --bf16 --overlap-grad-reduce --clip-grad 0",
        f"--zero-bubble --zero-bubble-vocabulary-parallel off {BY_LAYER}",
        base=f"--zero-bubble-schedule 1f1b {BY_LAYER}",
        rounding=1e-2,
    ),
    "lengths": Case(LENGTHS, f"{ZB_H1} {DATA_ORDER}"),
    "lengths, planned order": Case(ORDER_FREE, PLANNED_ORDER, rounding=1e-5),
    "vocabulary shards": Case(GPT, SHARDS, rounding=1e-4),
}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not equal."""
    assert found.keys() == expected.keys()
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> MegatronTrainings:
    return MegatronTrainings(FLAGS, tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_schedule_computes_what_megatrons_computes(trainings: MegatronTrainings, case: Case) -> None:
    ours, base = f"{case.model} {case.zero_bubble}", f"{case.model} {case.base}"
    assert "bubble rate:" in trainings.output(ours)
    if case.rounding:
        for numbers in (trainings.losses, trainings.norms):
            expected = [float(number) for number in numbers(base)]
            assert [float(number) for number in numbers(ours)] == pytest.approx(expected, rel=case.rounding)
        return
    assert trainings.losses(ours) == trainings.losses(base)
    assert trainings.norms(ours) == trainings.norms(base)
    assert different(trainings.tensors(ours), trainings.tensors(base)) == []


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [(ZB_H1, 4), ("--zero-bubble --zero-bubble-post-validation", 2), ("--zero-bubble-schedule zb-v", 2)],
)
def test_a_run_that_only_evaluates_has_megatrons_losses(flags: str, ranks: int) -> None:
    """Also in replicas, whose model is not in DDP."""
    only_evaluations = MegatronTrainings(("--global-batch-size", "4", "--skip-train", "--train-iters", "6"))
    seeds = BY_LAYER if "zb-v" in flags else ""
    base = f"{GPT} --zero-bubble-schedule 1f1b {seeds}" if seeds else GPT
    ours, expected = (
        losses(only_evaluations.output(f"{case} --pipeline-model-parallel-size 2", ranks))
        for case in (f"{GPT} {flags} {seeds}", base)
    )
    assert expected
    assert ours == expected


@pytest.mark.parametrize("precision", [pytest.param("", id="fp32", marks=pytest.mark.exhaustive), "--bf16"])
@pytest.mark.parametrize("placement", ["linear", "interleaved", "v"])
def test_pairs_of_a_forward_and_a_backward_compute_what_schedules_without_them_compute(
    trainings: MegatronTrainings, tmp_path: Path, placement: str, precision: str
) -> None:
    """On two pipeline ranks, whose experts are on two ranks. Megatron's own schedule is the other one, but for a V."""
    experts = (
        f"{GPT} --pipeline-model-parallel-size 2 --global-batch-size 16 --expert-model-parallel-size 2 --num-experts 4 "
        f"--moe-token-dispatcher-type alltoall --disable-bias-linear --moe-aux-loss-coeff 0.01 {precision}"
    )
    chunks = "--num-virtual-stages-per-pipeline-rank 2"
    schedule, apart = {
        "linear": (pairs_in_a_file(tmp_path), ""),
        "interleaved": (f"interleaved-pairs {chunks}", chunks),
        "v": ("dualpipe-v", "--zero-bubble-schedule zb-v"),
    }[placement]
    ours, base = f"{experts} {OVERLAP} --zero-bubble-schedule {schedule}", f"{experts} {apart}"
    assert "bubble rate:" in trainings.output(ours, ranks=4)
    assert trainings.losses(ours, ranks=4) == trainings.losses(base, ranks=4)
    assert trainings.norms(ours, ranks=4) == trainings.norms(base, ranks=4)
    assert different(trainings.tensors(ours, ranks=4), trainings.tensors(base, ranks=4)) == []


@pytest.mark.parametrize(
    ("flags", "gathering"), [("", ""), ("--overlap-grad-reduce", "--overlap-param-gather"), ("--bf16", "")]
)
def test_vocabulary_shards_compute_the_same_with_the_distributed_optimizer(
    trainings: MegatronTrainings, flags: str, gathering: str
) -> None:
    """On two replicas. Unclipped, because another order of adding up the norm changes its last bits."""
    flags = f"{GPT} --pipeline-model-parallel-size 2 --clip-grad 0 {SHARDS} {flags}"
    expected = trainings.losses(flags, ranks=4)
    assert expected
    assert trainings.losses(f"{flags} --use-distributed-optimizer {gathering}", ranks=4) == expected


@pytest.mark.parametrize(("first", "then"), [("", ZB_H1), (ZB_H1, "")], ids=["to zb-h1", "from zb-h1"])
def test_a_checkpoint_does_not_depend_on_the_schedule(trainings: MegatronTrainings, first: str, then: str) -> None:
    """The other schedule goes on as Megatron's goes on from its own checkpoint, and ends as it would without a stop."""
    stopped, own = f"{GPT} --exit-interval 4 {first}", f"{GPT} --exit-interval 4 "
    for flags in (stopped, own):
        trainings.output(flags)
    resumed = f"{GPT} --load {trainings.folder(stopped)} {then}"
    assert trainings.losses(resumed) == trainings.losses(f"{GPT} --load {trainings.folder(own)}")
    assert different(trainings.tensors(resumed), trainings.tensors(f"{GPT} ")) == []


def test_a_training_on_varied_lengths_resumes(trainings: MegatronTrainings) -> None:
    """In the order of the data with the numbers of Megatron's schedule without a stop; otherwise it ends, too."""
    stopped = f"{LENGTHS} --exit-interval 4 {ZB_H1} {DATA_ORDER}"
    trainings.output(stopped)
    resumed = f"{LENGTHS} --load {trainings.folder(stopped)} {ZB_H1}"
    assert different(trainings.tensors(f"{resumed} {DATA_ORDER}"), trainings.tensors(f"{LENGTHS} ")) == []


def test_an_order_is_planned_while_the_step_before_runs(trainings: MegatronTrainings) -> None:
    """Iterations 1 and 2 are measured. Iteration 3 is planned when it begins, and later ones while another runs."""
    output = trainings.output(f"{ORDER_FREE} {PLANNED_ORDER}")
    hidden = re.findall(r"microbatch order: \S+ times as fast, planned in \S+ ms, (.*?) \|", output)
    assert len(hidden) == 4
    assert hidden[0] == "not hidden in 1 of 1 steps"
    assert "hidden" in hidden[1:]


def test_torchrun_starts_it(trainings: MegatronTrainings) -> None:
    """As a user does; the other trainings are forked from a process that has imported Megatron."""
    flags = f"{GPT} {ZB_H1}"
    script, arguments = trainings.command(flags)
    job = run(2, "-m", "megatron.zero_bubble", str(script), *arguments)
    assert job.returncode == 0, job.stderr[-6000:]
    assert losses(job.stdout) == trainings.losses(flags)
