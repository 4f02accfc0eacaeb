"""The shape of messages, also where the lengths of microbatches vary, and functions that a step would not call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.mcore import step_call
from megatron.zero_bubble.mcore.step_call import StepCall, message_shape, refuse_sharded, refuse_unsupported


@pytest.mark.parametrize("varies", [False, True])
def test_messages_of_varying_lengths_have_the_shape_of_the_usual_length(
    varies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.17 on, megatron-core returns an empty shape where lengths vary."""

    def get_tensor_shapes(*, config: Any, seq_length: int, micro_batch_size: int, **others: Any) -> list[Any]:
        return [()] if config.variable_seq_lengths else [(seq_length, micro_batch_size, config.hidden_size)]

    monkeypatch.setattr(step_call.mcore, "get_tensor_shapes", get_tensor_shapes)
    config = SimpleNamespace(variable_seq_lengths=varies, hidden_size=4)
    assert message_shape(config, None, None, seq_length=3, micro_batch_size=2, decoder_seq_length=None) == (3, 2, 4)
    assert config.variable_seq_lengths is varies


@pytest.mark.parametrize(
    ("num_chunks", "data", "expected"),
    [(1, "it", ["it"]), (1, ["it"], ["it"]), (1, ("a", "b"), [("a", "b")]), (2, ("a", "b"), ["a", "b"])],
)
def test_the_iterator_of_one_chunk_may_be_a_tuple(num_chunks: int, data: Any, expected: list[Any]) -> None:
    """As in megatron-core, where a list has an iterator for each chunk."""
    arguments: dict[str, Any] = {"forward_step_func": print, "num_microbatches": 1, "seq_length": 1}
    model: Any = [object()] * num_chunks
    call = StepCall(**arguments, data_iterator=data, model=model, micro_batch_size=1)
    assert call.data_iterators == expected


class Wrapper:
    """Stands for megatron-core's DDP."""

    def start_grad_sync(self, *unused: Any) -> None: ...

    def reduce_compressed(self, *unused: Any) -> None: ...


@pytest.mark.parametrize("functions", [None, Wrapper().start_grad_sync, [Wrapper().start_grad_sync] * 2])
def test_gradients_are_reduced_by_ddp(functions: Any) -> None:
    refuse_unsupported(SimpleNamespace(grad_sync_func=functions), [], None)


@pytest.mark.parametrize("functions", [Wrapper().reduce_compressed, [Wrapper().start_grad_sync, lambda params: None]])
def test_a_function_that_would_never_reduce_gradients_is_refused(functions: Any) -> None:
    with pytest.raises(ValueError, match=r"^a grad_sync_func of your own is not supported"):
        refuse_unsupported(SimpleNamespace(grad_sync_func=functions), [], None)


def test_a_model_in_fsdp2_is_refused_except_in_this_projects_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 reduces the gradients that it finds right after B."""
    sharded = torch.nn.Sequential(torch.nn.Linear(1, 1))
    refuse_sharded([sharded])
    monkeypatch.setattr(step_call, "FSDPModule", torch.nn.Linear)
    with pytest.raises(ValueError, match=r"^torch's FSDP2 loses the weight gradients .*DistributedDataParallel"):
        refuse_sharded([sharded])
    monkeypatch.setattr(step_call, "FullyShardedChunk", torch.nn.Sequential)
    refuse_sharded([sharded])
