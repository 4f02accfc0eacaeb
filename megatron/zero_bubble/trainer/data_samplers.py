"""Samplers that yield the samples of each data-parallel rank, in Megatron's order.

Both samplers yield the sample indices of one microbatch at a time, forever or to the end of the data, starting after
`consumed_samples`. A run that resumes therefore sees exactly the rest of what an uninterrupted run would have seen,
and the global batch size may change on the way (ramp-up): it only decides how many microbatches make a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _MicrobatchSampler:
    """Base of both samplers: checked sizes, in samples."""

    total_samples: int
    consumed_samples: int
    """Samples that all data-parallel ranks together have used."""
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        assert self.micro_batch_size > 0
        assert 0 <= self.data_parallel_rank < self.data_parallel_size
        assert self.consumed_samples >= 0

    @property
    def stride(self) -> int:
        """Samples that one microbatch of every data-parallel rank takes."""
        return self.micro_batch_size * self.data_parallel_size


@dataclass(frozen=True)
class SequentialSampler(_MicrobatchSampler):
    """Sampler of `--dataloader-type single`: one pass in order; each rank takes its contiguous part of every stride.

    An incomplete last stride is dropped.
    """

    def __iter__(self) -> Iterator[list[int]]:
        offset = self.data_parallel_rank * self.micro_batch_size
        for start in range(self.consumed_samples, self.total_samples - self.stride + 1, self.stride):
            yield list(range(start + offset, start + offset + self.micro_batch_size))


@dataclass(frozen=True)
class CyclicSampler(_MicrobatchSampler):
    """Sampler of `--dataloader-type cyclic`: endless epochs, each in an order that the epoch's number seeds.

    Every rank shuffles its own contiguous shard (Megatron's default, data sharding), so the order depends on the
    data-parallel size, which a resumed run must keep.

    Raises ValueError if the data is less than one stride, or `consumed_samples` lies inside one (the run was
    continued with another data-parallel or microbatch size).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_samples < self.stride:
            raise ValueError(
                f"--dataloader-type cyclic: the data has {self.total_samples} samples, fewer than --micro-batch-size "
                f"{self.micro_batch_size} x data-parallel size {self.data_parallel_size}"
            )
        if self.consumed_samples % self.stride:
            raise ValueError(
                f"--dataloader-type cyclic: {self.consumed_samples} consumed samples are not a multiple of "
                f"--micro-batch-size {self.micro_batch_size} x data-parallel size {self.data_parallel_size}; "
                "continue with the sizes that the run had"
            )

    def __iter__(self) -> Iterator[list[int]]:
        strides_per_epoch = self.total_samples // self.stride
        shard_size = strides_per_epoch * self.micro_batch_size
        shard_start = self.data_parallel_rank * shard_size
        epoch, skipped_strides = divmod(self.consumed_samples // self.stride, strides_per_epoch)
        while True:
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(shard_size, generator=generator)[skipped_strides * self.micro_batch_size :]
            for indices in (order + shard_start).split(self.micro_batch_size):
                yield indices.tolist()
            epoch, skipped_strides = epoch + 1, 0
