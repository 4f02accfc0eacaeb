"""Specifies the functions on the device and the memory of this process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron.zero_bubble.runtime.device import return_free_heap

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")


def resident_mib() -> float:
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def test_memory_that_is_free_below_memory_in_use_goes_back_to_the_operating_system() -> None:
    small_tensors = [torch.ones(2**14) for _ in range(1600)]  # of 64 KiB, too small for pages of their own
    last = torch.ones(2**14)
    del small_tensors
    before = resident_mib()
    return_free_heap()
    assert before - resident_mib() > 50
    assert last.sum() == 2**14
