"""Microbatches are read once and given in the planned order, and the replicas of a job agree on a level of memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.look_ahead import LookAhead
from megatron.zero_bubble.runtime.step_planner import StepDecision
from megatron.zero_bubble.schedule import Infeasible
from tests.ranks import be_rank, run_on_ranks
from tests.trainings import process_group


def test_every_chunk_has_its_data_in_the_order_of_the_decision():
    from megatron.zero_bubble.mcore.microbatch_orders import StepData

    first, second = iter("abcd"), iter("ABCD")
    data = StepData([None, first, second], 3)
    nothing, of_first, of_second = data.ordered(StepDecision(None, (2, 0, 1)))
    assert nothing is None
    assert ("".join(islice(of_first, 3)), "".join(islice(of_second, 3))) == ("cab", "CAB")
    assert next(first) == "d"
    assert data.sizes() == [None] * 3


def test_data_that_ends_early_stays_in_its_order():
    from megatron.zero_bubble.mcore.microbatch_orders import StepData

    (given,) = StepData([iter("ab")], 3).ordered(StepDecision(None, (2, 0, 1)))
    assert "".join(given) == "ab"


def test_chunks_that_share_an_iterator_share_the_microbatches_of_a_step():
    from megatron.zero_bubble.mcore.microbatch_orders import StepData

    source = iter("abcdef")
    first, second = StepData([source, source], 3).ordered(StepDecision(None, (2, 0, 1)))
    assert [next(first), next(second), next(first)] == ["c", "a", "b"]
    assert "".join(source) == "def", "the next step has the following data"


def test_a_forward_step_that_reads_several_items_is_refused():
    from megatron.zero_bubble.mcore.microbatch_orders import StepData
    from megatron.zero_bubble.mcore.recorded_call import ForwardStepError

    (given,) = StepData([iter("abcd")], 2).ordered(StepDecision(None, (1, 0)))
    assert [next(given), next(given)] == ["b", "a"]
    with pytest.raises(
        ForwardStepError, match=r"^the forward step reads more than 2 items for 2 microbatches, .* data "
    ):
        next(given)
    (given,) = StepData([iter("abcd")], 2).ordered(StepDecision(None, (0, 1)))
    assert "".join(given) == "abcd", "the order of the data suits any forward step"


def test_data_without_next_reaches_the_forward_step_as_it_is_and_keeps_its_order():
    """slime's loop passes an object with `get_next(keys)`."""
    from megatron.zero_bubble.mcore.microbatch_orders import StepData
    from megatron.zero_bubble.mcore.recorded_call import ForwardStepError

    source = object()
    data = StepData([None, source], 2)
    assert (data.sizes(), data.sizes_ahead()) == ([None, None], [])
    assert data.ordered(StepDecision(None, (0, 1))) == [None, source]
    with pytest.raises(ForwardStepError, match=r"^the data source object has no __next__, .* data$"):
        data.ordered(StepDecision(None, (1, 0)))


def test_the_next_microbatches_are_seen_where_the_data_allows_it():
    from megatron.core.rerun_state_machine import RerunDataIterator

    from megatron.zero_bubble.mcore.microbatch_orders import StepData

    def microbatches() -> list[dict[str, torch.Tensor]]:
        return [{"tokens": torch.zeros(1, length, dtype=torch.long)} for length in (3, 5, 2, 7, 4)]

    assert StepData([iter(microbatches())], 2).sizes_ahead() == []
    for data in (LookAhead(microbatches()), RerunDataIterator(iter(microbatches()))):
        step = StepData([None, data], 2)
        assert [size.tokens for size in step.sizes() if size] == [3, 5]
        assert [size.tokens for size in step.sizes_ahead() if size] == [2, 7]
        assert next(data)["tokens"].shape[1] == 2


@pytest.mark.parametrize("name", ["save_state", "state_dict"])
def test_an_iterator_that_saves_its_position_is_not_read_ahead(name):
    """Energon's loader: Megatron-Bridge looks for `save_state` in the iterable of the `RerunDataIterator`."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    from megatron.zero_bubble.mcore.microbatch_orders import StepData

    class Loader(Iterator):
        def __init__(self) -> None:
            self.position = 0

        def __next__(self) -> torch.Tensor:
            self.position += 1
            return torch.zeros(1, self.position, dtype=torch.long)

    setattr(Loader, name, lambda self: self.position)
    data = RerunDataIterator(Loader())
    step = StepData([data], 2)
    assert [size.tokens for size in step.sizes() if size] == [1, 2]
    assert step.sizes_ahead() == []
    assert getattr(data.iterable, name)() == 2


def test_an_iterable_that_only_has_next_is_not_read_ahead():
    from megatron.core.rerun_state_machine import RerunDataIterator

    from megatron.zero_bubble.mcore.microbatch_orders import StepData

    class Loader:
        def __next__(self) -> torch.Tensor:
            return torch.zeros(1, 3, dtype=torch.long)

    assert StepData([RerunDataIterator(Loader())], 2).sizes_ahead() == []


def as_replica(rank: int, num_ranks: int, port: int) -> None:
    """Be one of the replicas of a pipeline of one rank."""
    be_rank(rank, num_ranks)
    with process_group(rank, num_ranks, dist.TCPStore("localhost", port)):
        from megatron.core import parallel_state

        from megatron.zero_bubble.mcore.microbatch_orders import JobPeers

        parallel_state.initialize_model_parallel(1, 1)
        peers = JobPeers(timedelta(seconds=60))
        assert peers.on_first(lambda: peers.highest(3 * rank)) == 3 * (num_ranks - 1)
        assert peers.gather(rank) == list(range(num_ranks))
        with pytest.raises(Infeasible, match=f"too long on {rank}"):
            peers.on_first(lambda: refuse(rank))
        parallel_state.destroy_model_parallel()


def refuse(rank: int) -> None:
    raise Infeasible(f"too long on {rank}", 1)


def test_replicas_agree_on_the_highest_level():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, as_replica, (store.port,), timeout=120) == 0
