"""The samples of each data-parallel rank, one microbatch after the other, in Megatron's order.

An iteration begins after the `consumed_samples` that all ranks together have used. A run that resumes therefore sees
exactly the rest of what an uninterrupted run would have seen, and the global batch size may change on the way
(ramp-up): it only decides how many microbatches make a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SequentialSampler:
    """Sampler of `--dataloader-type single`: one pass in order; each rank takes its contiguous part of every stride.

    A stride is a microbatch of every rank. An incomplete last one is dropped.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    rank: int
    num_ranks: int

    @property
    def stride(self) -> int:
        return self.micro_batch_size * self.num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        offset = self.rank * self.micro_batch_size
        for start in range(self.consumed_samples, self.total_samples - self.stride + 1, self.stride):
            yield list(range(start + offset, start + offset + self.micro_batch_size))


@dataclass(frozen=True)
class CyclicSampler(SequentialSampler):
    """Sampler of `--dataloader-type cyclic`: endless epochs, each in an order that the epoch's number seeds.

    Every rank shuffles its own contiguous shard (Megatron's default, data sharding), so the order depends on the
    data-parallel size, which a resumed run must keep.

    Raises:
        ValueError: the data is less than one stride, or `consumed_samples` lies inside one, because the run was
            continued with another data-parallel or microbatch size.
    """

    def __post_init__(self) -> None:
        sizes = f"--micro-batch-size {self.micro_batch_size} x data-parallel size {self.num_ranks}"
        if self.total_samples < self.stride:
            raise ValueError(f"--dataloader-type cyclic: the data has {self.total_samples} samples, fewer than {sizes}")
        if self.consumed_samples % self.stride:
            raise ValueError(
                f"--dataloader-type cyclic: {self.consumed_samples} consumed samples are not a multiple of {sizes}; "
                "continue with the sizes that the run had"
            )

    def __iter__(self) -> Iterator[list[int]]:
        strides_per_epoch = self.total_samples // self.stride
        shard_size = strides_per_epoch * self.micro_batch_size
        epoch, skipped_strides = divmod(self.consumed_samples // self.stride, strides_per_epoch)
        while True:
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(shard_size, generator=generator)[skipped_strides * self.micro_batch_size :]
            for indices in (order + self.rank * shard_size).split(self.micro_batch_size):
                yield indices.tolist()
            epoch, skipped_strides = epoch + 1, 0
