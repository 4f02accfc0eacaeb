"""A corpus small enough to be made anew wherever a training is tried out."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 120


def write_corpus(prefix: Path) -> None:
    """Sixty documents of 100 tokens each: megatron-core's mock data takes seconds to index."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in np.random.default_rng(1).integers(0, VOCAB_SIZE, (60, 100)):
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
