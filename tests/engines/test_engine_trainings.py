"""Megatron's own trainer, with layers of Transformer Engine, computes with our schedules what it computes alone.

`make test-megatron` runs this for the newest Megatron with the newest Transformer Engine, whose Python calls torch's
functions in the places of its kernels. W must be deferred for nearly all weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch import run
from tests.launcher.launched import Ended
from tests.megatrons.megatron_trainings import MegatronTrainings, needs_trainer
from tests.megatrons.test_megatrons import different

pytestmark = [
    needs_trainer,
    pytest.mark.skipif(
        find_spec("transformer_engine") is None, reason="there is no Transformer Engine: make test-megatron fetches it"
    ),
]

FLAGS = (
    *("--transformer-impl", "transformer_engine", "--global-batch-size", "8", "--train-iters", "4"),
    *("--save-interval", "4", "--eval-interval", "4", "--disable-bias-linear", "--normalization", "RMSNorm"),
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 32"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 12 --qk-layernorm --position-embedding-type rope"
)
MAMBA = "--mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8"
DELTA = (
    "--linear-conv-kernel-dim 2 --linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 4 "
    "--linear-num-value-heads 4"
)
MODELS = {
    "latent attention, experts, a prediction layer": (
        f"--num-layers 4 --swiglu {LATENT} {EXPERTS} --moe-layer-freq ([0]*1+[1]*3) --mtp-num-layers 1 "
        "--untie-embeddings-and-output-weights --overlap-grad-reduce"
    ),
    "hybrid of Mamba, attention, a gated delta net and latent experts": (
        f"--hybrid-layer-pattern M-*EG-*E {MAMBA} {DELTA} {EXPERTS} --moe-latent-size 16 --squared-relu "
        "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    ),
    "prediction layers that share their weights": (
        "--num-layers 4 --swiglu --position-embedding-type rope --mtp-num-layers 2 --mtp-use-repeated-layer "
        "--untie-embeddings-and-output-weights"
    ),
    "bf16, parts of layers recomputed": (
        f"--num-layers 4 --swiglu {EXPERTS} --bf16 --group-query-attention --num-query-groups 2 "
        "--recompute-granularity selective --recompute-modules layernorm moe_act"
    ),
}
OURS = "--zero-bubble-schedule zb-2p --zero-bubble-post-validation"


class EngineTrainings(MegatronTrainings):
    """Trainings whose ranks import Transformer Engine before they launch the script."""

    def job(self, ranks: int, script: Path, arguments: Sequence[str]) -> Ended:
        ended = run(ranks, "-m", "tests.engines.train_on_cpu", str(script), *arguments)
        return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> EngineTrainings:
    return EngineTrainings(FLAGS, tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_schedule_computes_what_megatrons_computes(
    trainings: EngineTrainings, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # Transformer Engine asserts that there is a GPU
    ours = f"{model} {OURS}"
    (share,) = re.findall(r"W is deferred for (\S+)% of the weights", trainings.output(ours))
    assert float(share) > 98
    assert trainings.losses(ours) == trainings.losses(model)
    assert trainings.norms(ours) == trainings.norms(model)
    assert different(trainings.tensors(ours), trainings.tensors(model)) == []
