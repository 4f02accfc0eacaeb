"""Datasets in which each document is one sample, so that the samples have different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset, MockGPTLowLevelDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch.nn.functional import pad

_SIGMA = 0.8
"""Standard deviation of log(length of a mock document); the median length is a quarter of the largest length."""


class NoSampleError(ValueError):
    """Raised if no document has a token and its label."""


class DocumentDataset(GPTDataset):
    """A dataset whose samples are the documents with at least two tokens, each truncated to the sequence length."""

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each sample's document index, and empty arrays in place of the sample index and the shuffle index."""
        whole = self.indices[self.dataset.sequence_lengths[self.indices] > 1]
        if not len(whole):
            raise NoSampleError(f"no document of {self.dataset_path} has two tokens")
        generator = np.random.RandomState(self.config.random_seed)
        num_epochs = max(1, -(-(self.num_samples or 0) // len(whole)))
        documents = np.concatenate([generator.permutation(whole) for _ in range(num_epochs)])
        return documents[: self.num_samples], np.empty(0), np.empty(0)

    def __len__(self) -> int:
        return len(self.document_index)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        document = self.document_index[index or 0]
        length = min(self.dataset.sequence_lengths[document], self.config.sequence_length + 1)
        text = torch.from_numpy(self.dataset.get(document, 0, length).astype(np.int64))
        tokens, loss_mask = text[:-1], torch.ones(length - 1)
        if self.config.eod_mask_loss:
            loss_mask[tokens == self.config.tokenizer.eod] = 0.0
        return {"tokens": tokens, "labels": text[1:], "loss_mask": loss_mask, "position_ids": torch.arange(length - 1)}


class MockDocumentDataset(DocumentDataset, MockGPTDataset):
    """A dataset of synthetic documents, whose lengths have a long tail."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> MockGPTLowLevelDataset | IndexedDataset:
        dataset = MockGPTLowLevelDataset(config.tokenizer)
        generator, longest = np.random.default_rng(dataset.seed), config.sequence_length + 1
        lengths = generator.lognormal(np.log(longest / 4), _SIGMA, dataset.size)
        dataset.sequence_lengths = lengths.clip(2, longest).astype(np.int32)
        return dataset


def padded(samples: Sequence[dict[str, torch.Tensor]], multiple: int) -> dict[str, torch.Tensor]:
    """Join samples of different lengths into a microbatch, and pad the shorter samples with zeros.

    Args:
        multiple: the padded length is rounded up to a multiple of this number.
    """
    longest = max(len(sample["tokens"]) for sample in samples)
    length = -(-longest // multiple) * multiple
    return {
        name: torch.stack([pad(sample[name], (0, length - len(sample[name]))) for sample in samples])
        for name in samples[0]
    }
