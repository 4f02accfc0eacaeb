"""Parameters, gradients and optimizer state sharded by torch's FSDP2 train as under DDP with the same schedule.

Losses and parameters are those of DDP byte for byte, as long as nothing is clipped. The norm of all gradients is summed
shard by shard, so its last bits differ, and with clipping those of the losses do. In bf16 with gradients in fp32, FSDP2
rounds the reduced gradients to bf16. A checkpoint of shards is loaded by shards, and without sharding. `make test` runs
ZeRO-3 under the schedule with the most in flight, cut in two by a checkpoint, too, and ZeRO-2.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.changes import KilledRank
from tests.launch import TINY_GPT
from tests.trainings import Trainings, run_trainings

COMMON = [
    *(*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--train-iters", "4"),
    *("--untie-embeddings-and-output-weights", "--clip-grad", "0"),
]
FSDP, KEEPS = "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"
MODELS = {
    "fp32": (),
    "bf16": ("--bf16",),
    "bf16-gradients": ("--bf16", "--grad-reduce-in-bf16"),
    "per-token-loss": ("--calculate-per-token-loss",),
    "sgd": ("--optimizer", "sgd"),
    "llama-like": (
        *("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
        *("--group-query-attention", "--num-query-groups", "2", "--recompute-granularity", "selective"),
    ),
    "zb-v": ("--zero-bubble-schedule", "zb-v"),
    "interleaved": ("--zero-bubble-schedule", "interleaved-zb", "--num-virtual-stages-per-pipeline-rank", "2"),
}
SCHEDULES = ("1f1b", "zb-h1", "zb-2p")
EXACT = {f"{schedule}-fp32": (FSDP, "--zero-bubble-schedule", schedule) for schedule in SCHEDULES}
EXACT |= {
    "zero-2-fp32": (FSDP, KEEPS, "--zero-bubble-schedule", "zb-h1"),
    "auto-fp32": (FSDP, "--zero-bubble", "--zero-bubble-keep-layout"),
}
EXACT["megatron-core-fp32"] = (FSDP,)
EXACT |= {f"zero-3-{model}": (FSDP,) for model in MODELS if model not in ("fp32", "bf16")}
EXACT["zero-2-zb-v"] = (FSDP, KEEPS)
CLOSE = {
    "clipped": ("ddp-clipped", (FSDP, "--clip-grad", "0.5")),
    "every-microbatch": ("ddp-fp32", (FSDP, "--zero-bubble-reduce-every-microbatch")),
    "bf16": ("ddp-bf16", (FSDP, "--bf16")),
    "zero-2-every-microbatch": ("ddp-fp32", (FSDP, KEEPS, "--zero-bubble-reduce-every-microbatch")),
}
RESUMED = {
    "shards by shards": ("fp32", (FSDP,), (FSDP,)),
    "shards by ddp": ("fp32", (FSDP,), ()),
    "ddp by shards": ("fp32", (), (FSDP, KEEPS)),
    "sgd by shards": ("sgd", (FSDP,), (FSDP,)),
    "gated by ddp": ("llama-like", (FSDP,), ()),
}
"""For each job that goes on from a checkpoint: the model, and the sharding of the job that saves and of the other."""
IN_MAKE_TEST = ("zb-2p-fp32", "zero-2-fp32")


@pytest.fixture(scope="module")
def numerics(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Four ranks, two replicas of two stages; `ddp-*` keep everything whole on every replica."""
    ours = ("--zero-bubble-schedule", "zb-h1")
    trainings = {f"ddp-{model}": [*COMMON, *ours, *flags] for model, flags in MODELS.items()}
    trainings["ddp-clipped"] = [*COMMON, *ours, "--clip-grad", "0.5"]
    for name, flags in EXACT.items():
        trainings[name] = [*COMMON, *ours, *MODELS[_model(name)], *flags]
    for name, (_, flags) in CLOSE.items():
        trainings[name] = [*COMMON, *ours, *flags]
    for name in ("auto-fp32", "megatron-core-fp32"):
        trainings[name] = [*COMMON, *EXACT[name]]
    folder = tmp_path_factory.mktemp("sharded")
    for name, (model, saving, loading) in RESUMED.items():
        flags, checkpoint = [*COMMON, *ours, *MODELS[model]], str(folder / f"{name} checkpoint")
        trainings[f"{name} saved"] = [*flags, *saving, "--save", checkpoint, "--exit-interval", "2"]
        trainings[name] = [*flags, *loading, "--load", checkpoint]
    return Trainings(4, trainings, folder)


def _model(name: str) -> str:
    return next(model for model in sorted(MODELS, key=len, reverse=True) if name.endswith(model))


def lines(numerics: Trainings, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in numerics.numerics(name).splitlines()]


def norms(of: list[dict[str, object]]) -> list[float]:
    return [float.fromhex(str(line["grad_norm"])) for line in of]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.exhaustive) for name in EXACT]
)
def test_losses_and_parameters_are_those_of_ddp(numerics: Trainings, name: str) -> None:
    numerics.run(name, f"ddp-{_model(name)}")
    ours, theirs = lines(numerics, name), lines(numerics, f"ddp-{_model(name)}")
    for key in ("lm_loss", "parameters"):
        assert [line[key] for line in ours] == [line[key] for line in theirs]
    assert norms(ours) == pytest.approx(norms(theirs), rel=2e-6)
    assert len({line["lm_loss"] for line in ours}) == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CLOSE)
def test_sums_in_another_order_differ_by_rounding(numerics: Trainings, name: str) -> None:
    ours, theirs = lines(numerics, name), lines(numerics, CLOSE[name][0])
    losses = [[float.fromhex(str(line["lm_loss"])) for line in of] for of in (ours, theirs)]
    rounding = 2**-8 if name == "bf16" else 1e-5
    assert losses[0] == pytest.approx(losses[1], rel=rounding)
    assert norms(ours) == pytest.approx(norms(theirs), rel=10 * rounding)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "shards by shards" else pytest.mark.exhaustive) for name in RESUMED],
)
def test_a_resumed_job_goes_on_like_one_that_never_stopped(numerics: Trainings, name: str) -> None:
    uncut = f"ddp-{RESUMED[name][0]}"
    numerics.run(f"{name} saved", name, uncut)
    ours, theirs = lines(numerics, name), lines(numerics, uncut)[2:]
    assert [line["iteration"] for line in ours] == [3, 4]
    for key in ("lm_loss", "parameters"):
        assert [line[key] for line in ours] == [line[key] for line in theirs]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flags",
    [
        # With dropout a V repeats only if it is not planned again from times that differ from run to run.
        pytest.param(
            ("--zero-bubble-schedule", "zb-v", "--zero-bubble-profile-iters", "0", "0", "--bf16"),
            id="zero-3 in a V, bf16",
        ),
        pytest.param(("--zero-bubble-schedule", "zb-h1", KEEPS, "--bf16", "--grad-reduce-in-bf16"), id="zero-2, bf16"),
    ],
)
def test_killed_in_a_step_and_resumed(flags: tuple[str, ...], tmp_path: Path) -> None:
    """A rank dies in the fifth step; the job goes on from the checkpoint of the third, and no digit differs."""
    flags = (*COMMON, FSDP, *flags, "--clip-grad", "1.0", "--train-iters", "8", "--eval-iters", "1")
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "3")
    run_trainings(4, {"uncut": flags, "cut": [*flags, *save, KilledRank(5, rank=1)]}, tmp_path, status=-signal.SIGKILL)
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"
    run_trainings(4, {"cut": [*flags, *save, "--load", str(tmp_path / "checkpoints")]}, tmp_path)
    cut, uncut = ((tmp_path / f"{name}.jsonl").read_bytes() for name in ("cut", "uncut"))
    assert cut == uncut
    assert uncut.count(b"\n") == 8
