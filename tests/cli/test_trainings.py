"""Trainings that the offline commands run in their own process leave the process as it was."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from megatron.zero_bubble.cli.trainings import complete_arguments, one_process
from tests.launch import TINY_GPT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, for which megatron-core is adapted")


def test_a_process_that_cannot_be_set_up_is_as_before() -> None:
    args = complete_arguments([*TINY_GPT], 1, "test", has_cuda=False)
    before = dict(os.environ), torch.ones, torch.Tensor.cuda, sys.excepthook
    with torch.compiler.set_stance("force_eager"), one_process(args):
        inside = dict(os.environ), torch.ones, torch.Tensor.cuda, sys.excepthook
        with pytest.raises(ValueError, match="twice"), one_process(args):
            pass
        assert (dict(os.environ), torch.ones, torch.Tensor.cuda, sys.excepthook) == inside
    assert (dict(os.environ), torch.ones, torch.Tensor.cuda, sys.excepthook) == before
