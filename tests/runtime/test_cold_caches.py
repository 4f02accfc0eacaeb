"""The buffer that evicts the caches of a device."""

from __future__ import annotations

import torch

from megatron.zero_bubble.runtime.cold_caches import ColdCaches


def test_the_whole_buffer_is_read_and_written_each_time():
    caches = ColdCaches(torch.device("cpu"))
    buffer = caches._buffer
    assert buffer.nbytes == 32 * 2**20
    caches.evict()
    caches.evict()
    assert torch.equal(buffer, torch.full_like(buffer, 2))


def test_a_gpu_s_larger_cache_is_evicted_whole(monkeypatch):
    zeros = torch.zeros
    properties = type("Properties", (), {"L2_cache_size": 50 * 2**20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    assert ColdCaches(torch.device("cuda", 0))._buffer.nbytes == 50 * 2**20
