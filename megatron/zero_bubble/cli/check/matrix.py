"""The training jobs of `zero-bubble check`, which run each layout under megatron-core's schedule and our schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.zero_bubble.cli.check.models import REPEATABLE_ATTENTION

NUM_RANKS = 4
VOCAB_SIZE = 120
REFERENCE = "megatron-core"
ROUNDING = 0.01
"""Two losses count as equal up to this relative difference, because a sum in bf16 depends on the order of its terms."""
_CHECKPOINT = "checkpoint"
_MODEL = {
    "paper": ("--hidden-size", "512", "--num-attention-heads", "8", "--seq-length", "256", "--micro-batch-size", "1"),
    "tiny": ("--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--micro-batch-size", "1"),
}
_TRAINING = (
    *("--num-layers", "8", "--global-batch-size", "8", "--bf16", "--lr", "1e-2", "--lr-decay-style", "constant"),
    *("--train-iters", "6", "--log-interval", "1", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", str(VOCAB_SIZE)),
)
_PP4 = ("--pipeline-model-parallel-size", "4")
_PP2 = ("--pipeline-model-parallel-size", "2")
_PP2_DP2 = (*_PP2, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
_PLANNED = ("--zero-bubble", "--zero-bubble-keep-layout", "--zero-bubble-profile-iters", "2", "3")
"""Flags that plan a schedule but keep the reference job's layout, so that numerics can be compared bitwise."""
_LITTLE_MEMORY = (*_PLANNED, "--zero-bubble-memory-limit", "0.5")
_WITHOUT_ORDER = ("--clip-grad", "0", "--attention-dropout", "0", "--hidden-dropout", "0")
"""Flags that disable gradient clipping and dropout, because both depend on the placement of the stages."""
_TWO_CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
_EXPERTS = (
    *(*_PP2_DP2, "--expert-model-parallel-size", "2", "--num-experts", "4", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear"),
)


@dataclass(frozen=True)
class Cell:
    """One training job of `zero-bubble check`, with its flags and the values to compare."""

    layout: str
    name: str
    flags: tuple[str, ...]
    compares: str = "everything"
    """The values that must equal the reference's values: `everything`, `the losses`, `rounded losses` or `nothing`."""

    @property
    def title(self) -> str:
        return f"{self.layout}: {self.name}"

    @property
    def is_ours(self) -> bool:
        return self.name not in (REFERENCE, _CHECKPOINT)


def _layout(name: str, flags: Sequence[str], **ours: Sequence[str]) -> list[Cell]:
    cells = [Cell(name, REFERENCE, tuple(flags))]
    for schedule, more in ours.items():
        compares = "rounded losses" if "--zero-bubble-vocabulary-parallel" in more else "everything"
        cells.append(Cell(name, schedule.replace("_", "-"), (*flags, *more), compares))
    return cells


def _schedule_flags(schedule: str, *more: str) -> tuple[str, ...]:
    return ("--zero-bubble-schedule", schedule, *more)


_ZB_H1, _ZB_2P = {"zb_h1": _schedule_flags("zb-h1")}, {"zb_2p": _schedule_flags("zb-2p")}


def _only_transformer_engine() -> list[Cell]:
    return [
        *_layout("PP2 x EP2, grouped experts", (*_EXPERTS, "--moe-grouped-gemm"), **_ZB_H1),
        *_layout("PP4, fp8", (*_PP4, "--fp8-format", "hybrid"), **_ZB_H1, **_ZB_2P),
    ]


def cells(size: str, folder: Path, transformer_impl: str = "local") -> list[Cell]:
    """Return all training jobs of `zero-bubble check`; a job comes after the jobs whose files it reads.

    Args:
        size: `paper` or `tiny`.
        folder: the folder with the training data and the checkpoint from which some training jobs start.
        transformer_impl: the implementation of the layers, `local` or `transformer_engine`.
    """
    is_local = transformer_impl == "local"
    checkpoint = str(folder / "checkpoint")
    load = (*_PP4, *_WITHOUT_ORDER, "--load", checkpoint, "--override-opt_param-scheduler")
    trainings = [
        *_layout(
            "PP4",
            _PP4,
            **_ZB_H1,
            **_ZB_2P,
            auto=_PLANNED,
            post_validation=_schedule_flags("zb-2p", "--zero-bubble-post-validation"),
            recomputation=(*_LITTLE_MEMORY, "--zero-bubble-recompute", "planned"),
            **({"copies": (*_LITTLE_MEMORY, "--zero-bubble-offload", "auto")} if is_local else {}),
        ),
        *_layout("PP4, two chunks a rank", (*_PP4, *_TWO_CHUNKS), interleaved_zb=_schedule_flags("interleaved-zb")),
        *_layout("PP2 x TP2", (*_PP2, "--tensor-model-parallel-size", "2", "--sequence-parallel"), **_ZB_H1),
        *_layout("PP2 x DP2, overlapped", _PP2_DP2, **_ZB_H1),
        *_layout(
            "PP2 x EP2, two chunks a rank",
            (*_EXPERTS, *_TWO_CHUNKS),
            pairs=_schedule_flags("interleaved-pairs", "--overlap-moe-expert-parallel-comm"),
        ),
        *_layout(
            "PP4, shards",
            (*_PP4, "--zero-bubble-seed-by-layer"),
            shards=_schedule_flags("zb-2p", "--zero-bubble-vocabulary-parallel", "on"),
        ),
        *_layout(
            "PP4, documents",
            (*_PP4, "--variable-seq-lengths"),
            documents=_schedule_flags("zb-2p", "--zero-bubble-microbatch-order", "data"),
        ),
        *([] if is_local else _only_transformer_engine()),
        Cell(
            "PP4 from a checkpoint",
            _CHECKPOINT,
            (*_PP4, *_WITHOUT_ORDER, "--save", checkpoint, "--exit-interval", "1"),
            "nothing",
        ),
        Cell("PP4 from a checkpoint", REFERENCE, load),
        Cell("PP4 from a checkpoint", "zb-v", (*load, *_schedule_flags("zb-v")), "the losses"),
    ]
    data = ("--train-data-path", str(folder / "corpus"))
    common = (*_MODEL[size], *_TRAINING, *REPEATABLE_ATTENTION[transformer_impl], *data)
    return [replace(cell, flags=(*common, *cell.flags)) for cell in trainings]


def names(transformer_impl: str = "local") -> tuple[str, ...]:
    """Return the names of jobs that the flag `--cell` accepts with the layer implementation `transformer_impl`."""
    return tuple(dict.fromkeys(cell.name for cell in cells("tiny", Path(), transformer_impl) if cell.is_ours))


def chosen(everything: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """Return the training jobs named in `names`, and the jobs of the same layouts under megatron-core's schedule.

    If `names` is empty, the function returns all jobs.
    """
    layouts = {cell.layout for cell in everything if cell.name in names}
    return [
        cell for cell in everything if not names or cell.name in names or (cell.layout in layouts and not cell.is_ours)
    ]


def write_corpus(prefix: Path) -> None:
    """Write a corpus of sixty documents of 100 tokens; megatron-core's mock data would take seconds to index."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in np.random.default_rng(1).integers(0, VOCAB_SIZE, (60, 100)):
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
