"""The checks of gradients that DDP asks for."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.zero_bubble.mcore.finite import FiniteCheck
from megatron.zero_bubble.schedule import Placement


@pytest.mark.parametrize("check_for_large", [False, True])
def test_megatron_core_still_warns_of_large_gradients(check_for_large: bool) -> None:
    check = mock.Mock()
    group = SimpleNamespace(buckets=[SimpleNamespace(grad_data=torch.ones(4))], check_grads=check)
    chunk = SimpleNamespace(bucket_groups=[group])
    finite = FiniteCheck([chunk], Placement("linear", 2), ValueError, lambda: 1)
    group.check_grads(check_for_nan_or_inf=True, check_for_large=check_for_large)
    assert finite._unreduced_norms[id(group)].tolist() == [2]
    expected = [mock.call(check_for_nan_or_inf=False, check_for_large=True)] if check_for_large else []
    assert check.call_args_list == expected
