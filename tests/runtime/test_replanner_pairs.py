"""Steps with pairs of a forward and a backward are not measured again."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron.zero_bubble.runtime.plan_report import PlanningOptions
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.runtime.replanner import Replanner
from megatron.zero_bubble.schedule import Op, OpKind


@pytest.mark.parametrize(("kind", "is_added"), [(OpKind.B, True), (OpKind.PB, False), (OpKind.PBW, False)])
def test_the_operations_of_steps_with_pairs_are_not_collected(kind, is_added):
    measured = mock.Mock(observer=mock.Mock(sinks=[]))
    options = PlanningOptions(0, 0, {}, profile=mock.Mock(), threshold=0.1)
    Replanner(mock.Mock(), options, measured, mock.Mock(), mock.Mock())
    (collect,) = measured.observer.sinks
    ops = [MeasuredOp(Op(OpKind.F, 0), 0.0, 1.0), MeasuredOp(Op(kind, 0), 1.0, 2.0)]
    for step in (20, 21):
        collect(step, ops)
    assert measured.add.called is is_added
