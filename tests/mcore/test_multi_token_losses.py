"""Every rank of a group takes part in the sum of the losses, whatever its own losses are."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.zero_bubble.mcore import multi_token


@pytest.mark.parametrize(("of_others", "losses"), [(6.0, (1.5,)), (0.0, ())])
def test_a_rank_without_losses_takes_part_in_the_mean(monkeypatch, of_others, losses):
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {"values": torch.zeros(1)})
    monkeypatch.setattr(multi_token.dist, "all_reduce", lambda total, group: total.add_(of_others / 4))
    assert multi_token.take_losses(2, mock.Mock(**{"size.return_value": 2})) == losses


def test_a_rank_without_a_last_stage_takes_no_part(monkeypatch):
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    assert multi_token.take_losses(2, mock.Mock()) == ()
