"""Starts programs on real ranks: by torchrun, as a user does, or in the ranks of a module of tests."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from tests.ranks import append_output, be_rank, run_on_ranks

ROOT = Path(__file__).parents[1]
PRETRAIN = ROOT / "pretrain_gpt.py"

TINY_GPT = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--lr", "1e-2", "--mock-data", "--vocab-size", "120"),
    *("--train-iters", "10", "--log-interval", "1"),
]
"""A model small enough that start-up is most of a run."""

DEEPSEEK_V3 = (
    *("--multi-latent-attention", "--q-lora-rank", "24", "--kv-lora-rank", "16", "--qk-head-dim", "8"),
    *("--qk-pos-emb-head-dim", "4", "--v-head-dim", "12", "--qk-layernorm", "--rotary-scaling-factor", "40"),
    *("--mscale", "1.0", "--mscale-all-dim", "1.0", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--no-rope-fusion"),
    *("--num-experts", "8", "--moe-layer-freq", "([0]*1+[1]*3)", "--moe-ffn-hidden-size", "16"),
    *("--moe-shared-expert-intermediate-size", "16", "--moe-router-load-balancing-type", "seq_aux_loss"),
    *("--moe-aux-loss-coeff", "1e-2", "--moe-router-topk", "4", "--moe-router-num-groups", "4"),
    *("--moe-router-group-topk", "2", "--moe-router-pre-softmax", "--moe-router-topk-scaling-factor", "2.5"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--moe-router-dtype", "fp32"),
    *("--moe-router-bias-update-rate", "1e-2", "--moe-token-dispatcher-type", "alltoall", "--mtp-num-layers", "1"),
    *("--mtp-loss-scaling-factor", "0.3", "--bf16", "--attention-dropout", "0", "--hidden-dropout", "0"),
)
"""The flags of DeepSeek-V3 with small sizes: dense and expert layers, a shared expert, a prediction layer."""


def torchrun(num_ranks: int, script: str | Path, *flags: str) -> list[str]:
    """The command line that starts `script` on `num_ranks` processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*launcher, str(script), *flags]


def environment() -> dict[str, str]:
    """One thread a rank: the ranks share few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(num_ranks: int, script: str | Path, *flags: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run to the end; stdout and stderr are captured."""
    command = torchrun(num_ranks, script, *flags)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)


def run_script(num_ranks: int, script: Path, folder: Path, *flags: str, timeout: float = 600) -> str:
    """Run a script in the ranks of this module of tests, as torchrun would; all must end with status 0.

    Args:
        folder: for what the ranks print.

    Returns:
        What they printed to stdout.
    """
    outputs = folder / "stdout.txt", folder / "stderr.txt"
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    status = run_on_ranks(num_ranks, _be_script, (script, flags, outputs, store.port), timeout)
    assert status == 0, f"status {status}: {outputs[1].read_text()[-6000:]}"
    return outputs[0].read_text()


def _be_script(
    rank: int, num_ranks: int, script: Path, flags: tuple[str, ...], outputs: tuple[Path, Path], port: int
) -> None:
    be_rank(rank, num_ranks)
    append_output(outputs)
    # The master's store is the test's, as it is torchrun's agent's.
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
    sys.argv = [str(script), *flags]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.path.remove(str(script.parent))
