"""Runs trainings of Megatron's own trainer, of the version that is on the path, under the launcher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.launcher.launched import Ended, launch

TRAINER = find_spec("megatron.training")
needs_trainer = pytest.mark.skipif(
    TRAINER is None, reason="there is no megatron.training: make test-megatron fetches it"
)
FOLDER = Path(TRAINER.origin).parents[2] if TRAINER is not None and TRAINER.origin is not None else Path()
"""A wheel, unpacked, or a checkout of Megatron-LM."""
needs_hybrid_model = pytest.mark.skipif(
    not (FOLDER / "megatron" / "core" / "models" / "hybrid").exists(), reason="this Megatron has no hybrid models"
)
COMMON = (
    *("--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--max-position-embeddings", "16"),
    *("--micro-batch-size", "1", "--transformer-impl", "local", "--distributed-backend", "gloo"),
    *("--use-cpu-initialization", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    *("--no-rope-fusion", "--no-bias-dropout-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
    *("--lr", "1e-2", "--clip-grad", "0.5", "--eval-iters", "1", "--log-interval", "1", "--ckpt-format", "torch_dist"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "120", "--num-workers", "0"),
    "--zero-bubble-cpu",
)


class MegatronTrainings:
    """Trainings by their flags, each of which runs when a test first asks for it.

    Args:
        flags: of all trainings, beside `COMMON`.
        root: a folder to which each training saves; None where none does.
    """

    def __init__(self, flags: Sequence[str], root: Path | None = None) -> None:
        self._flags, self._root = (*COMMON, *flags), root
        self._folders: dict[str, Path] = {}
        self._outputs: dict[tuple[str, int], str] = {}

    def folder(self, flags: str) -> Path:
        """The folder to which the training with these flags saves."""
        assert self._root is not None
        return self._folders.setdefault(flags, self._root / str(len(self._folders)))

    def command(self, flags: str, ranks: int = 2) -> tuple[Path, list[str]]:
        """The script and the arguments of a training.

        The script is Megatron-LM's own, but for wheels, which have none, and for samples of varied lengths.
        """
        script = FOLDER / ("pretrain_hybrid.py" if "--hybrid" in flags else "pretrain_gpt.py")
        if not script.exists() or "--varied-lengths" in flags:
            script = Path(__file__).with_name("pretrain.py")
        saving = [] if self._root is None else ["--save", str(self.folder(flags))]
        size = ("--pipeline-model-parallel-size", str(ranks))
        return script, [*self._flags, *size, *saving, *flags.split()]

    def job(self, ranks: int, script: Path, arguments: Sequence[str]) -> Ended:
        return launch(ranks, script, *arguments)

    def output(self, flags: str, ranks: int = 2) -> str:
        """What the ranks print."""
        if (flags, ranks) not in self._outputs:
            job = self.job(ranks, *self.command(flags, ranks))
            assert job.status == 0, f"status {job.status}: {job.output[-2000:]}{job.errors[-6000:]}"
            self._outputs[flags, ranks] = job.output
        return self._outputs[flags, ranks]

    def losses(self, flags: str, ranks: int = 2) -> list[str]:
        return losses(self.output(flags, ranks))

    def norms(self, flags: str, ranks: int = 2) -> list[str]:
        """The norm of the gradients of every iteration."""
        return re.findall(r"grad norm: (\S+)", self.output(flags, ranks))

    def tensors(self, flags: str, ranks: int = 2) -> dict[str, torch.Tensor]:
        """The parameters and the state of the optimizer after the last iteration."""
        self.output(flags, ranks)
        (folder,) = self.folder(flags).glob("iter_*")
        reader = FileSystemReader(folder)
        state = {
            name: torch.empty(found.size, dtype=found.properties.dtype)
            for name, found in reader.read_metadata().state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        load(state, storage_reader=reader, no_dist=True)
        return state


def losses(output: str) -> list[str]:
    """Losses and perplexities in the order in which they are printed."""
    return re.findall(r"(?:lm loss|mtp_\d loss|load_balancing_loss|loss value|loss PPL): (\S+)", output)
