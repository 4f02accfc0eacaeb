"""Measures the cost of splitting the backward: B plus W, compared with megatron-core's fused backward."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron.zero_bubble.cli.trainings import complete_arguments, one_process, rank_model
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Placement

_ANY_TRAINING = (
    *("--train-iters", "1", "--lr", "1e-3", "--mock-data", "--vocab-size", "4096", "--num-workers", "0"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)


@dataclass(frozen=True)
class ModelSize:
    """A GPT with the architecture of the quickstart (examples/pretrain_sample.sh)."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int

    def flags(self) -> list[str]:
        names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
        sizes = [(f"--{name.replace('_', '-')}", str(getattr(self, name))) for name in names]
        return [word for pair in sizes for word in pair] + list(_ANY_TRAINING)


@dataclass(frozen=True)
class Round:
    """Seconds of processor time of one microbatch in the fused backward, in B and in W."""

    fused: float
    b: float
    w: float

    @property
    def price(self) -> float:
        return (self.b + self.w) / self.fused


def measure_split(size: ModelSize, rounds: int) -> list[Round]:
    """Time the backward of one microbatch `rounds` times in the fused model and in the split model.

    The two models take turns and alternate in going first, so that noise affects both models equally.
    """
    with _both_models(size.flags()) as (fused, split, store):
        batch = _batch(size)
        _run_fused(fused, batch)
        _run_split(split, store, batch)
        measured = []
        for number in range(rounds):
            if number % 2:
                b, w = _run_split(split, store, batch)
                whole = _run_fused(fused, batch)
            else:
                whole = _run_fused(fused, batch)
                b, w = _run_split(split, store, batch)
            measured.append(Round(whole, b, w))
    return measured


@contextmanager
def _both_models(flags: Sequence[str]) -> Iterator[tuple[torch.nn.Module, torch.nn.Module, WeightGradStore]]:
    """Yield the model with megatron-core's fused backward, the split model, and the store of the split model.

    Both models are built as in training.
    """
    args = complete_arguments(flags, 1, "benchmarks.overhead", has_cuda=False)
    placement, store = Placement("linear", 1), WeightGradStore()
    with one_process(args):
        [fused] = rank_model(args, placement, 0, None)
        [split] = rank_model(args, placement, 0, store)
        yield fused, split, store


_Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _batch(size: ModelSize) -> _Batch:
    shape = (size.micro_batch_size, size.seq_length)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(4096, shape, generator=generator) for _ in range(2))
    return tokens, torch.arange(size.seq_length).expand(shape), labels


def _forward(model: torch.nn.Module, batch: _Batch) -> torch.Tensor:
    tokens, positions, labels = batch
    loss: torch.Tensor = model(tokens, positions, None, labels=labels).mean()
    return loss


def _run_fused(model: torch.nn.Module, batch: _Batch) -> float:
    loss = _forward(model, batch)
    begin = time.thread_time()
    loss.backward()
    return time.thread_time() - begin


def _run_split(model: torch.nn.Module, store: WeightGradStore, batch: _Batch) -> tuple[float, float]:
    loss = _forward(model, batch)
    begin = time.thread_time()
    with store.deferring():
        loss.backward()
    store.flush(0, 0)
    middle = time.thread_time()
    store.pop(0, 0)
    return middle - begin, time.thread_time() - middle
