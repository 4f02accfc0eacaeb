"""Steps that are taken before they are validated; `tests/end_to_end/test_post_validation.py` trains with them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from split_layers import one_rank

from megatron.zero_bubble.mcore import post_validation as module
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.runtime.rollback import Snapshot

GRADIENTS = (torch.tensor([0.3, 0.4]), torch.tensor([3.0, 4.0]), torch.tensor([0.1, 0.2]))
"""The gradients of three steps. At a norm of 1, only the second gradient is clipped."""


class Negating(torch.optim.SGD):
    """An optimizer whose step changes the gradients in place."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.neg_(), alpha=group["lr"])


@pytest.fixture(scope="module", autouse=True)
def _one_rank_without_cuda() -> Iterator[None]:
    with one_rank():
        yield


def optimizer_of(torch_optimizer: torch.optim.Optimizer) -> FP32Optimizer:
    return FP32Optimizer(torch_optimizer, OptimizerConfig(optimizer="sgd", clip_grad=1.0), lambda *_: None)


def with_main_grad(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.main_grad = gradient.clone()


def post_validation(optimizer: FP32Optimizer) -> PostValidation:
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(num_distributed_optimizer_instances=1))
    return PostValidation(optimizer, Snapshot([optimizer.optimizer]), [chunk])


def test_a_scheduler_of_any_setting_takes_its_course_through_a_repeated_step():
    """`OneCycleLR` also cycles the momentum, here from 0.95 down: a repeated step has the momentum of its own step."""

    def train(late: bool) -> tuple[torch.Tensor, list[float]]:
        parameter = torch.nn.Parameter(torch.ones(2))
        inner = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        optimizer = optimizer_of(inner)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=0.1, total_steps=10)
        validation, momenta = post_validation(optimizer), []
        for gradient in GRADIENTS:
            with_main_grad(parameter, gradient)
            validation.step() if late else optimizer.step()
            scheduler.step()
            if late:
                validation.validate()
            momenta.append(inner.param_groups[0]["momentum"])
        return parameter.detach(), momenta

    (expected, momenta), (parameter, late_momenta) = train(late=False), train(late=True)
    assert torch.equal(parameter, expected)
    assert late_momenta == momenta
    assert len(set(momenta)) == 3


def test_gathered_fp8_parameters_of_an_undone_step_are_transposed_again(monkeypatch):
    """B reads transposed copies, which megatron-core 0.16 and 0.17 leave outdated after a forced gather."""
    calls = []
    plain, quantized = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = optimizer_of(torch.optim.SGD([plain, quantized], lr=0.1))
    optimizer.config.use_distributed_optimizer = True
    validation = post_validation(optimizer)
    vars(validation._chunks[0]).update(
        bucket_groups=[],
        expert_parallel_bucket_groups=[],
        parameters=lambda: iter([plain, quantized]),
        start_param_sync=lambda *, force_sync: calls.append("gather"),
    )
    monkeypatch.setattr(module, "is_float8tensor", lambda parameter: parameter is quantized)
    monkeypatch.setattr(module, "post_all_gather_processing", calls.append)
    validation._gather()
    assert calls == ["gather", [quantized]]


def test_an_optimizer_that_changes_gradients_is_refused_at_its_first_step():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = optimizer_of(Negating([parameter], lr=0.1))
    with_main_grad(parameter, GRADIENTS[0])
    with pytest.raises(ValueError, match=r"^Negating\.step\(\) changes gradients in place"):
        post_validation(optimizer).step()
