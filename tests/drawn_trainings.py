"""Trainings drawn at random, with megatron-core's own schedule and with a zero-bubble schedule of the same layout.

    python -m tests.drawn_trainings --first-seed 7000 --trainings 100

draws architectures, sizes and kinds of parallelism for two or four ranks, and compares losses, norms and parameters
of both schedules byte for byte. The exit status is 1 if some differ. Every seed gives flags that megatron-core accepts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.trainings import run_trainings

SCHEDULES = (
    ("--zero-bubble", "--zero-bubble-keep-layout"),
    *(("--zero-bubble-schedule", name) for name in ("zb-h1", "zb-h2", "zb-2p")),
)


class DrawnTraining(NamedTuple):
    """A training, and the further flags of its zero-bubble schedule."""

    num_ranks: int
    flags: list[str]
    ours: list[str]


def drawn_training(seed: int) -> DrawnTraining:
    """Return the training of a seed."""
    return _Draw(seed).training()


def equals_megatron_cores(training: DrawnTraining, folder: Path) -> bool:
    """Run a training under both schedules, and return whether losses, norms and parameters are the same bytes."""
    both = {"core": training.flags, "ours": [*training.flags, *training.ours]}
    run_trainings(training.num_ranks, both, folder)
    core, ours = ((folder / f"{name}.jsonl").read_bytes() for name in both)
    return core == ours


class _Draw:
    """The random choices of one training."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.flags: list[str] = []
        self.pipeline = self.random.choice((2, 2, 2, 4))
        self.beside = self.random.choice(("tensor", "context", "data", "data", None)) if self.pipeline == 2 else None
        self.is_hybrid = self.beside != "context" and self.maybe(0.2)
        self.is_latent = not self.is_hybrid and self.maybe(0.2)
        self.has_experts = self.maybe(0.45)
        self.num_layers = self.random.choice((4, 4, 8))
        self.num_further = 0 if self.is_hybrid else self.random.choice((*[0] * 8, 1, 2))
        self.heads = self.random.choice((4, 8))
        self.width = self.heads * self.random.choice((8, 16))

    def training(self) -> DrawnTraining:
        self.draw_sizes()
        self.draw_attention()
        self.draw_layers()
        if self.has_experts:
            self.draw_experts()
        self.draw_recomputation()
        self.draw_numbers()
        ours = [*self.random.choice(SCHEDULES)]
        if self.maybe(0.3):
            ours.append("--zero-bubble-post-validation")
        return DrawnTraining(self.pipeline * (2 if self.beside else 1), self.flags, ours)

    def maybe(self, probability: float) -> bool:
        return self.random.random() < probability

    def add(self, *words: object) -> None:
        self.flags += map(str, words)

    def sometimes(self, probability: float, *words: object) -> None:
        if self.maybe(probability):
            self.add(*words)

    def draw_sizes(self) -> None:
        if self.is_hybrid:
            symbols = "M*-E" if self.has_experts else "M*-"
            between = self.random.choices(symbols, k=2 * self.num_layers - 2)
            # A value that begins with - would be taken for a flag; experts need a layer E.
            pattern = [self.random.choice("M*"), *between, symbols[-1]]
            self.add("--hybrid-layer-pattern", "".join(pattern))
            self.add("--mamba-num-groups", 2, "--mamba-state-dim", 8, "--mamba-head-dim", 8)
        else:
            self.add("--num-layers", self.num_layers)
        micro_batch, replicas = self.random.choice((1, 2)), 2 if self.beside == "data" else 1
        self.add("--hidden-size", self.width, "--num-attention-heads", self.heads)
        self.add("--seq-length", self.random.choice((16, 32)), "--vocab-size", self.random.choice((120, 250)))
        self.add("--micro-batch-size", micro_batch)
        self.add("--global-batch-size", micro_batch * replicas * self.random.choice((2, 3, 4, 5, 8)))
        self.add("--train-iters", 4, "--lr", "1e-2", "--pipeline-model-parallel-size", self.pipeline)
        if self.beside == "tensor":
            self.add("--tensor-model-parallel-size", 2, "--sequence-parallel")
        elif self.beside == "context":
            self.add("--context-parallel-size", 2)
            self.sometimes(0.5, "--cp-comm-type", self.random.choice(("p2p", "all_gather", "a2a")))

    def draw_attention(self) -> None:
        if self.is_latent:
            self.add("--multi-latent-attention", "--position-embedding-type", "rope", "--kv-lora-rank", 8)
            self.add("--qk-head-dim", 8, "--qk-pos-emb-head-dim", 4, "--v-head-dim", 8)
            self.sometimes(0.6, "--q-lora-rank", 12)
        else:
            self.sometimes(0.4, "--group-query-attention", "--num-query-groups", 2)
            self.sometimes(0.15, "--kv-channels", 8)
            self.sometimes(0.2, "--add-qkv-bias")
            if self.beside != "context":
                self.sometimes(0.15, "--window-size", "4,0")
            self.sometimes(0.15, "--softmax-type", self.random.choice(("off-by-one", "learnable")))
            self.sometimes(0.1, "--attention-output-gate")
            if self.maybe(0.6):
                self.add("--position-embedding-type", "rope")
                self.sometimes(0.1, "--rotary-interleaved")
                self.sometimes(0.1, "--rotary-percent", 0.5)
        self.sometimes(0.3, "--qk-layernorm")

    def draw_layers(self) -> None:
        gates = ("--quick-geglu", "--activation-func-clamp-value", 7, "--glu-linear-offset", 1)
        self.add(*self.random.choice(((), ("--swiglu",), ("--swiglu",), ("--squared-relu",), gates)))
        self.sometimes(0.5, "--normalization", "RMSNorm")
        self.sometimes(0.2, "--apply-layernorm-1p")
        self.sometimes(0.2, "--ffn-hidden-size", 3 * self.width)
        self.sometimes(0.4, "--untie-embeddings-and-output-weights")
        self.sometimes(0.1, "--apply-residual-connection-post-layernorm")
        self.sometimes(0.5, "--attention-dropout", 0, "--hidden-dropout", 0)
        self.sometimes(0.2, "--init-method-std", 0.01)
        if self.has_experts:  # megatron-core's local experts have no biases
            self.add("--disable-bias-linear")
        else:
            self.sometimes(0.4, "--disable-bias-linear")
        if self.num_further:
            self.add("--mtp-num-layers", self.num_further)

    def draw_experts(self) -> None:
        self.add("--num-experts", self.random.choice((4, 8)), "--moe-router-topk", self.random.choice((2, 4)))
        self.add("--moe-token-dispatcher-type", self.random.choice(("alltoall", "alltoall", "allgather")))
        kind = self.random.choice(("aux_loss", "seq_aux_loss", "global_aux_loss", "none"))
        self.add("--moe-router-load-balancing-type", kind, "--moe-aux-loss-coeff", "1e-2")
        self.sometimes(0.3, "--moe-z-loss-coeff", "1e-3")
        self.sometimes(0.4, "--moe-shared-expert-intermediate-size", self.width)
        self.sometimes(0.3, "--moe-ffn-hidden-size", self.width)
        self.sometimes(0.2, "--moe-router-dtype", "fp32")
        self.sometimes(0.2, "--moe-router-pre-softmax")
        if self.beside != "tensor":  # tensor ranks would gather different numbers of tokens, which gloo cannot
            self.sometimes(0.2, "--moe-expert-capacity-factor", 1)
        if self.maybe(0.3):
            self.add("--moe-router-score-function", "sigmoid")
            self.sometimes(0.6, "--moe-router-enable-expert-bias")
        if not self.is_hybrid:
            self.sometimes(0.4, "--moe-layer-freq", self.random.choice((2, f"([0]*1+[1]*{self.num_layers - 1})")))
        if self.beside == "data":
            self.sometimes(0.6, "--expert-model-parallel-size", 2)

    def draw_recomputation(self) -> None:
        # Recomputing several prediction layers changes the order of a sum, also under megatron-core's own schedule.
        if not self.is_hybrid and self.num_further < 2 and self.maybe(0.15):
            method = self.random.choice(("uniform", "block"))
            self.add("--recompute-granularity", "full", "--recompute-method", method, "--recompute-num-layers", 1)
        elif self.maybe(0.2):
            self.add("--recompute-granularity", "selective")
            modules = [
                "core_attn",
                *(["moe"] if self.has_experts else []),
                *(["mla_up_proj"] if self.is_latent else []),
            ]
            self.sometimes(0.7, "--recompute-modules", self.random.choice(modules))

    def draw_numbers(self) -> None:
        self.sometimes(0.3, "--calculate-per-token-loss")
        self.sometimes(0.3, "--bf16")
        self.sometimes(0.2, "--cross-entropy-loss-fusion")
        self.sometimes(0.15, "--clip-grad", 0)
        if self.maybe(0.35):
            self.add("--use-distributed-optimizer")
            if self.beside == "data" and self.maybe(0.5):
                self.add("--overlap-grad-reduce")
                self.sometimes(0.5, "--overlap-param-gather")


def _compare(seeds: Iterable[int]) -> bool:
    """Train every seed's training under both schedules, print a line for each, and return whether all are equal."""
    all_equal = True
    for seed in seeds:
        training = drawn_training(seed)
        with tempfile.TemporaryDirectory() as folder:
            equal = equals_megatron_cores(training, Path(folder))
        words = " ".join((*training.flags, *training.ours))
        print(f"{seed}: {'equal' if equal else 'DIFFERENT'}, {training.num_ranks} ranks: {words}", flush=True)
        all_equal &= equal
    return all_equal


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, required=True)
    parser.add_argument("--trainings", type=int, required=True)
    given = parser.parse_args()
    sys.exit(not _compare(range(given.first_seed, given.first_seed + given.trainings)))
