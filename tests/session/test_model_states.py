"""The bytes that ZeRO leaves on a rank, and those that replicas send, are the known formulas."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.session.model_states import States
from tests.checked_flags import checked

BF16 = {"--bf16": None, "--grad-reduce-in-bf16": None}
FSDP = {"--use-torch-fsdp2": None, "--untie-embeddings-and-output-weights": None, "--zero-bubble-schedule": "zb-h1"}
KEEPS, EVERY = (
    {flag: None} for flag in ("--torch-fsdp2-no-reshard-after-forward", "--zero-bubble-reduce-every-microbatch")
)
NUM_PARAMETER_PASSES = {"0": 0, "1": 1, "2": 1, "3": 6}


@pytest.mark.parametrize("replicas", [1, 2, 8, 64])
def test_the_table_that_everybody_draws(replicas):
    args = checked(BF16)
    known = [16, 4 + 12 / replicas, 2 + 14 / replicas, 16 / replicas]
    assert [States.of(args, stage).bytes_a_parameter(replicas) for stage in range(4)] == pytest.approx(known)
    assert [sum(States.of(args, stage).passes(1)) for stage in range(4)] == [2, 2, 2, 3]


@pytest.mark.parametrize(
    ("flags", "in_a_step", "passes"),
    [
        (BF16, 16, (2, 0)),
        (BF16 | {"--use-distributed-optimizer": None}, 4 + 12 / 8, (1, 1)),
        (BF16 | FSDP | KEEPS | EVERY, 2 + 16 / 8, (3, 1)),
        (BF16 | FSDP | EVERY, 16 / 8, (3, 6)),
        (BF16 | FSDP | KEEPS, 4 + 14 / 8, (1, 1)),
        (BF16 | FSDP, 2 + 14 / 8, (1, 6)),
        ({"--bf16": None} | FSDP, 4 + 14 / 8, (1, 6)),
        ({"--bf16": None} | FSDP | EVERY, 16 / 8, (3, 6)),
    ],
)
def test_the_flags_decide_what_replicas_keep_and_how_often_they_exchange_it(flags, in_a_step, passes):
    """Eight replicas, three microbatches; torch's FSDP2 keeps a shard beside parameters that stay gathered."""
    states = States.of(checked(flags))
    assert states.bytes_a_parameter(8) == in_a_step
    assert states.passes(3) == passes


def test_instances_divide_among_themselves_and_all_reduce_shards():
    flags = BF16 | {"--use-distributed-optimizer": None, "--num-distributed-optimizer-instances": "2"}
    states = States.of(checked(flags, world_size=16))
    assert states.bytes_a_parameter(8) == 4 + 12 / 4
    assert states.sent_a_parameter(8, 1) == (2 + 2) * 3 / 4 + 2 * 2 / 4 / 2
