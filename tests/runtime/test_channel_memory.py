"""The memory of the channels is the difference of what the driver says before and after; CUDA is stood in for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron.zero_bubble.runtime.channel_memory import ChannelMemory, open_channels
from megatron.zero_bubble.schedule import Placement


class Device:
    """A device whose free memory shrinks with every communicator that is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.is_synchronized = 1000, False
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._mem_get_info)

    def _synchronize(self, device: Any) -> None:
        self.is_synchronized = True

    def _mem_get_info(self, device: Any) -> tuple[int, int]:
        assert self.is_synchronized, "what the device has not come to yet is not counted"
        return self.free, 1000

    def communicator(self, *arguments: Any) -> str:
        self.free, self.is_synchronized = self.free - 300, False
        return "opened"


@pytest.mark.parametrize(("device", "reports"), [("cuda", [ChannelMemory(2, 300)]), ("cpu", [])])
def test_the_memory_of_the_channels_is_reported_on_a_gpu(one_rank, monkeypatch, device, reports):
    found: list[ChannelMemory] = []
    fake: Any = Device(monkeypatch).communicator
    placement = Placement("linear", 2)
    opened = open_channels(fake, one_rank, placement, torch.device(device), timedelta(seconds=1), found.append)
    assert (opened, found) == ("opened", reports)
