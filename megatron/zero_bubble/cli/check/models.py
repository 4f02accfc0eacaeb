"""The models that `zero-bubble check` measures and trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.zero_bubble.cli.trainings import complete_arguments

if TYPE_CHECKING:
    from megatron.zero_bubble.trainer.arguments import Arguments

PROG = "zero-bubble check"
REPEATABLE_ATTENTION = {
    "local": ("--attention-backend", "local"),
    "transformer_engine": ("--transformer-impl", "transformer_engine", "--attention-backend", "unfused"),
}
"""Layer implementation -> flags for layers with unfused attention, which has a deterministic backward."""
_ANY_TRAINING = (
    *("--train-iters", "1", "--lr", "1e-4", "--mock-data", "--bf16", "--untie-embeddings-and-output-weights"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
_ATTENTION = {**REPEATABLE_ATTENTION, "transformer_engine": ("--transformer-impl", "transformer_engine")}
"""Layer implementation -> flags that choose this implementation for the measurement of a stage."""


@dataclass(frozen=True)
class Model:
    """A GPT that is cut into equal stages."""

    name: str
    layers_a_stage: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    pipeline_size: int
    vocab_size: int = 50257
    transformer_impl: str = "local"

    @property
    def num_microbatches(self) -> int:
        """The smallest number of microbatches with which the zero-bubble paper runs the model."""
        return 3 * self.pipeline_size

    def arguments(self, num_stages: int) -> Arguments:
        """Return the arguments for training `num_stages` stages of this model, with `layers_a_stage` layers each."""
        sizes = {
            "num-layers": self.layers_a_stage * num_stages,
            "hidden-size": self.hidden_size,
            "num-attention-heads": self.num_attention_heads,
            "seq-length": self.seq_length,
            "micro-batch-size": self.micro_batch_size,
            "vocab-size": self.vocab_size,
            "pipeline-model-parallel-size": num_stages,
        }
        flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        flags += [*_ANY_TRAINING, *_ATTENTION[self.transformer_impl]]
        return complete_arguments(flags, num_stages, PROG, has_cuda=self.transformer_impl == "transformer_engine")


SIZES = {
    "paper": (
        Model("1.5B", 3, 2304, 24, 1024, 6, 8),
        Model("6.2B", 4, 4096, 32, 1024, 3, 8),
        Model("14.6B", 3, 5120, 40, 1024, 1, 16),
        Model("28.3B", 2, 6144, 48, 1024, 1, 32),
    ),
    "tiny": (Model("tiny", 1, 64, 4, 32, 2, 4, vocab_size=120),),
}
"""Models for the measurement of a stage: models of the zero-bubble paper (Qi et al. 2024), and a tiny model."""
