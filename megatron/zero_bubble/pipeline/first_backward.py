"""Runs the backward of every stage once before the first step, because a step could hang at the first use of a kernel.

On a GPU, the first launch of a kernel may wait until the device has finished all work. In a step, this work includes
receives that are posted in advance (see `mcore/warm_up.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from megatron.zero_bubble.pipeline.messages import StageMessage


def is_needed(device: torch.device) -> bool:
    """Whether a backward runs before the first step of a stage on `device`."""
    return device.type == "cuda" and torch.is_grad_enabled()


def run_first_backward(value: Any, parameters: Collection[nn.Parameter], device: torch.device) -> None:
    """Run the backward of a stage's output `value`, and drop the gradients.

    Not to be called if the user differentiates the stage's inputs, to whose gradients the backward would add.

    Nothing runs if a parameter has a hook, which may count gradients or take a step; hooks of modules and of other
    tensors run. An error is not reported, because the backward of the step reports it.
    """
    if any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters):
        return
    gradients = [(each, each.grad) for each in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.autocast(device.type, enabled=False), suppress(Exception):
            output = StageMessage.of(value)
            output.backward([torch.ones_like(tensor) for tensor in output.tensors])
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
