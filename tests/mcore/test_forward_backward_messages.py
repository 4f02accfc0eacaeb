"""A stage that sends another tensor than the next one expects is told so, and the next one does not wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.mcore.recorded_call import ForwardStepError


def check(output: Any, *, shapes_vary: bool = False) -> None:
    config = SimpleNamespace(pipeline_dtype=torch.float32)
    stage: Any = SimpleNamespace(
        shapes_vary=shapes_vary, call=SimpleNamespace(output_shape=(2, 1, 4)), _config=config, finalizes=True
    )
    MegatronStage._check_message(stage, 3, output)


def test_a_message_of_the_expected_shape_is_sent():
    check(torch.zeros(2, 1, 4))


def test_another_shape_is_refused_unless_messages_tell_theirs():
    wide = torch.zeros(2, 1, 8)
    check(wide, shapes_vary=True)
    with pytest.raises(ForwardStepError, match=r"^stage 3 .* shape \(2, 1, 8\), .* have \(2, 1, 4\), .*variable_seq_l"):
        check(wide)


@pytest.mark.parametrize("shapes_vary", [False, True])
def test_another_type_is_refused(shapes_vary: bool):
    with pytest.raises(
        ForwardStepError, match=r"^stage 3 sends .* torch.bfloat16, .*[.]pipeline_dtype, torch.float32$"
    ):
        check(torch.zeros(2, 1, 4, dtype=torch.bfloat16), shapes_vary=shapes_vary)


@pytest.mark.parametrize("shapes_vary", [False, True])
def test_several_tensors_are_refused(shapes_vary: bool):
    with pytest.raises(ForwardStepError, match=r"^stage 3 sends a tuple, but messages are one tensor each$"):
        check((torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)), shapes_vary=shapes_vary)
