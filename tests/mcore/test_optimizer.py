"""What differs between megatron-core's optimizers and versions, where steps are taken before their norm is known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.mcore.optimizer import _root, allocate_states, gradients_of_norm, loadable, refuse_optimizer


def part(kind: type = FP32Optimizer, **settings: object) -> FP32Optimizer:
    substitution = substitute_cuda()
    parameter = torch.nn.Parameter(torch.zeros(2))
    made = kind(torch.optim.SGD([parameter]), SimpleNamespace(**settings), None)
    substitution.restore()
    return made


class StepsAnotherWay(FP32Optimizer):
    pass


class StepsThePartsOfOthers(ChainedOptimizer):
    """As megatron-core's `LayerWiseDistributedOptimizer` does, each of whose replicas steps some of the layers."""


def test_the_gradients_of_the_norm_have_a_function_of_either_name():
    """`get_main_grads_for_grad_norm` until megatron-core 0.18, `get_grads_for_grad_norm` since 0.19."""
    gradients = [torch.ones(1)]
    old = SimpleNamespace(get_main_grads_for_grad_norm=lambda: gradients)
    new = SimpleNamespace(get_grads_for_grad_norm=lambda group=None: gradients)
    assert gradients_of_norm(old) is gradients_of_norm(new) is gradients


def test_the_root_is_taken_as_the_version_does(monkeypatch):
    """Since 0.17, and with Transformer Engine, the device takes the root; else the host, which rounds differently."""
    squared = torch.tensor([2.0])
    assert _root(squared) == 2.0**0.5
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", print, raising=False)
    assert torch.equal(_root(squared), squared.pow(0.5))
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None)
    assert _root(squared) == 2.0**0.5


def test_what_steps_in_another_way_is_refused():
    refuse_optimizer(ChainedOptimizer([part()]))
    refuse_optimizer(part(grad_norm_skip_threshold=float("inf")))
    with pytest.raises(ValueError, match=r"^megatron-core's optimizer StepsAnotherWay is not supported$"):
        refuse_optimizer(ChainedOptimizer([part(StepsAnotherWay)]))
    with pytest.raises(ValueError, match=r"^megatron-core's optimizer StepsThePartsOfOthers is not supported$"):
        refuse_optimizer(StepsThePartsOfOthers([part()]))
    with pytest.raises(ValueError, match=r"^grad_norm_skip_threshold is not supported"):
        refuse_optimizer(part(grad_norm_skip_threshold=10.0))


@pytest.mark.parametrize("name", ["tp_mode", "mode"])
def test_a_step_that_tensor_ranks_take_together_is_refused(monkeypatch, name):
    """A rank decides alone whether it steps, as Muon's other modes do not allow."""
    muon = part()
    for mode, num_ranks in (("blockwise", 2), ("duplicated", 1)):
        setattr(muon.optimizer, name, mode)
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: num_ranks)  # noqa: B023
        refuse_optimizer(muon)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    with pytest.raises(
        ValueError, match=r"^SGD of mode duplicated is not supported .*: give --muon-tp-mode blockwise$"
    ):
        refuse_optimizer(muon)


def adam(*parameters: torch.nn.Parameter) -> FP32Optimizer:
    substitution = substitute_cuda()
    made = FP32Optimizer(torch.optim.AdamW([{"params": [*parameters]}]), SimpleNamespace(), lambda *_: None)
    substitution.restore()
    return made


def test_a_part_without_parameters_saves_and_loads_the_number_of_steps():
    """As the part for experts on rank 0, which saves the number for all ranks, where its stage has no experts."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    dense = adam(weight)
    for _ in range(3):
        dense.optimizer.step()
    without = adam()
    allocate_states(ChainedOptimizer([dense, without]))
    (state,) = without.optimizer.state_dict()["state"].values()
    assert state["step"] == 3
    resumed = adam(torch.nn.Parameter(torch.zeros(2)))
    with loadable(resumed):
        saved = without.optimizer.state_dict()["state"]
        resumed.optimizer.load_state_dict({**dense.optimizer.state_dict(), "state": saved})
    assert not [key for key in resumed.optimizer.state if isinstance(key, str)]


def test_parts_of_which_one_was_saved_without_its_steps_have_the_same_number():
    """As in a checkpoint of an earlier version, whose rank 0 had no experts."""
    chained = ChainedOptimizer([adam(torch.nn.Parameter(torch.zeros(2))) for _ in range(2)])
    with loadable(chained):
        for state in chained.chained_optimizers[0].optimizer.state.values():
            state["step"].fill_(3)
    assert [state["step"] for part in chained.chained_optimizers for state in part.optimizer.state.values()] == [3, 3]
