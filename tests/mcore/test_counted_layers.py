"""Operations of kernels that the counts of a model's layers depend on."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.zero_bubble.mcore.counted_layers import convolution_backward_flops

FORMULAS = {torch.ops.aten.convolution_backward: convolution_backward_flops}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_gradient_of_a_convolution_takes_as_many_operations_as_its_output(groups: int, transposed: bool) -> None:
    kind = torch.nn.ConvTranspose1d if transposed else torch.nn.Conv1d
    convolution = kind(8, 8, kernel_size=3, padding=1, groups=groups, device="meta")
    images = torch.empty(2, 8, 20, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        output = convolution(images)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as backward:
        output.sum().backward()
    assert forward.get_total_flops() == 2 * 2 * 20 * 8 * 8 // groups * 3
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
