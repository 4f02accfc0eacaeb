"""The host link on a CPU: copies in the background, in order, at an emulated rate, into memory that is used again."""

from __future__ import annotations

import time

import pytest
import torch

from megatron.zero_bubble.runtime.copy_lane import (
    CopyPair,
    HostBuffers,
    HostMemoryError,
    ThreadLink,
    copy_lane,
    link_rate,
)


def test_copies_run_in_the_order_in_which_they_are_put_in_line():
    lane, source = ThreadLink(), torch.arange(4, dtype=torch.uint8)
    host, back = lane.host_tensor(4), torch.zeros(4, dtype=torch.uint8)
    lane.start([CopyPair(source, host)])
    later = lane.start([CopyPair(host, back)])
    later.wait()
    assert torch.equal(back, source)
    assert later.seconds() >= 0


def test_an_emulated_link_takes_the_time_of_its_rate_and_nobody_else_waits():
    lane = ThreadLink(bytes_per_second=1e6)
    source, begin = torch.zeros(200_000, dtype=torch.uint8), time.perf_counter()
    copy = lane.start([CopyPair(source, lane.host_tensor(source.nbytes))])
    assert time.perf_counter() - begin < 0.15
    copy.wait()
    assert time.perf_counter() - begin >= 0.2
    assert copy.seconds() >= 0.2


def test_the_rate_of_a_link_is_measured():
    rate = link_rate(ThreadLink(bytes_per_second=1e9), torch.device("cpu"))
    assert 1e4 < rate <= 1e6, "in bytes a millisecond; a busy machine makes it slower"


def test_host_memory_is_used_again():
    buffers = HostBuffers(ThreadLink())
    first, second = buffers.take(8), buffers.take(8)
    buffers.give_back(first)
    assert buffers.take(8) is first
    assert buffers.take(16).nbytes == 16
    assert buffers.num_bytes == 32
    assert second is not first


def test_sizes_that_vary_from_step_to_step_share_a_few_buffers():
    """The activations of experts have another size in each step."""
    buffers = HostBuffers(ThreadLink())
    for step in range(200):
        taken = [buffers.take(4096 + 7 * step + size) for size in (0, 1000, 2000)]
        assert all(buffer.nbytes >= 4096 + 7 * step for buffer in taken)
        for buffer in taken:
            buffers.give_back(buffer)
    assert buffers.num_bytes <= 4 * 8192


def test_a_host_without_memory_is_one_line_that_names_the_flag():
    class Full(ThreadLink):
        def host_tensor(self, num_bytes):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(HostMemoryError, match=r"no room for 8 more bytes .*--zero-bubble-offload off$") as caught:
        HostBuffers(Full()).take(8)
    assert "\n" not in str(caught.value)


def test_a_cpu_has_a_thread_as_its_link():
    assert isinstance(copy_lane(torch.device("cpu")), ThreadLink)
