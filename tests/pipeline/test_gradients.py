"""Gradients are averaged over replicas, in real process groups, and have the norms that torch computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_threads import merged, pipelines
from torch.nn.functional import mse_loss

from megatron.zero_bubble.pipeline.gradients import average_over, own_norms, total_norm
from tests.ranks import run_on_ranks
from tests.trainings import process_group


def average_gradients(rank: int, num_ranks: int, port: int) -> None:
    """Average the gradients of four parameters; an assertion that fails fails the test."""
    with process_group(rank, num_ranks, dist.TCPStore("localhost", port)):
        parameters = [torch.nn.Parameter(torch.ones(2), requires_grad=number != 3) for number in range(4)]
        parameters[0].grad = torch.full((2,), float(rank))
        if rank == 1:
            parameters[1].grad = torch.full((2,), 4.0)
        average_over(dist.group.WORLD, parameters)
        found = [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]
        assert found == [[0.5, 0.5], [2.0, 2.0], None, None]


def test_a_parameter_without_a_gradient_on_any_replica_keeps_none():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, average_gradients, (store.port,), timeout=60) == 0


class OtherTensor(torch.Tensor):
    """A type of tensor that torch does not pass to its functions for lists of tensors."""


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("has_other", [False, True])
def test_norms_come_from_the_functions_that_torch_uses(norm_type, has_other, monkeypatch):
    """The function for lists of tensors rounds differently here, as on a CUDA device."""
    foreach_norm = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *given: [norm * (1 + 1e-3) for norm in foreach_norm(*given)])
    torch.manual_seed(6)
    types = [
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.float16,
    ]
    for order in (types, types[::-1], [torch.float32] * 7):
        parameters = [torch.nn.Parameter(torch.zeros(50 + k, dtype=dtype)) for k, dtype in enumerate(order)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if has_other:
            parameters[2].grad = parameters[2].grad.as_subclass(OtherTensor)
        expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters], norm_type)
        counted = list(enumerate(parameters))
        of_ranks = [*own_norms(counted[4:], norm_type), *own_norms(counted[:4], norm_type)]
        found = total_norm(of_ranks, torch.device("cpu"), norm_type)
        if not has_other:  # with it, torch's choice depends on the gradients of all ranks
            assert torch.equal(found, expected)
            assert found.dtype is expected.dtype
        else:
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("post_validation", [False, True])
def test_without_clipping_a_gradient_that_is_not_finite_changes_no_other_gradient(post_validation):
    def use(pipeline):
        optimizer = torch.optim.SGD(pipeline.parameters())
        for name, parameter in pipeline.named_parameters():
            if name == "0.weight":
                parameter.register_hook(lambda grad: grad / 0)
        outcomes = pipeline.train_step((torch.ones(8, 4), torch.zeros(8, 4)), optimizer), pipeline.settle()
        assert not any(outcome.grad_norm.isfinite() for outcome in outcomes if outcome is not None)
        return {name: bool(parameter.isfinite().all()) for name, parameter in pipeline.named_parameters()}

    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "post_validation": post_validation}
    assert merged(pipelines(2, layers, mse_loss, use, **arguments)) == {
        "0.weight": False,
        "0.bias": True,
        "1.weight": True,
        "1.bias": True,
    }


def test_the_type_of_a_norm_may_be_a_string_as_in_torch():
    def use(pipeline):
        pipeline.train_batch((torch.ones(8, 4), torch.zeros(8, 4)))
        largest = max(parameter.grad.abs().max() for parameter in pipeline.parameters())
        return pipeline.clip_grad_norm_("0.25", norm_type="inf"), largest

    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    found = pipelines(2, layers, mse_loss, use, schedule="zb-h1", num_microbatches=4)
    assert {float(norm) for norm, _ in found} == {max(float(largest) for _, largest in found)}
