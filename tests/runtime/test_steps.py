"""The operations of a rank as steps."""

from megatron.zero_bubble.runtime.steps import steps_of
from megatron.zero_bubble.schedule import Op, OpKind

F0, B0, W0, B1, W1 = (Op(OpKind[name[0]], int(name[1])) for name in ("F0", "B0", "W0", "B1", "W1"))


def test_the_position_of_a_step_counts_all_operations_before_it():
    steps = steps_of([(F0,), (W0, W1), (B1,)])
    assert [(step.position, step.name) for step in steps] == [(0, "F0"), (1, "W0 W1"), (3, "B1")]
