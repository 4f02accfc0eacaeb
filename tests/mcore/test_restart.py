"""Forwards that run again after a rollback leave what they would have left the first time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

from megatron.zero_bubble.cli.check.stage_run import make_stage
from megatron.zero_bubble.cli.trainings import complete_arguments, one_process, rank_model
from megatron.zero_bubble.mcore import restart
from megatron.zero_bubble.mcore.restart import Restart, RewindableIterator, copied_rng_states, make_rewindable
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.trainer.arguments import Arguments
from tests.launch import TINY_GPT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, for which megatron-core is adapted")

EXPERTS = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.1", "--disable-bias-linear")


@pytest.fixture
def args() -> Iterator[Arguments]:
    flags = [*TINY_GPT, *EXPERTS, "--untie-embeddings-and-output-weights"]
    args = complete_arguments(flags, 1, "test", has_cuda=False)
    # megatron-core compiles what experts call, unless torch knew better when it was imported.
    with torch.compiler.set_stance("force_eager"), one_process(args):
        yield args


def test_the_losses_of_experts_count_once(args: Arguments) -> None:
    placement = Placement("linear", 1)
    stage = make_stage(args, placement, 0, rank_model(args, placement, 0, WeightGradStore()), torch.device("cpu"))
    clear_aux_losses_tracker()  # of other tests of this process
    stage._prepare_restart()
    stage.forward(0, 0, None)
    once = get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"].clone()
    assert once.all()
    stage.restart()
    stage.forward(0, 0, None)
    assert torch.equal(get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"], once)


def test_generators_of_a_tracker_for_cuda_graphs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a tracker, as of `--te-rng-tracker`, gives its generators instead of their states."""
    states = torch.get_rng_state(), torch.Generator(), {"model": torch.Generator()}
    monkeypatch.setattr(restart.random, "_get_all_rng_states", lambda: states)
    monkeypatch.setattr(restart.random, "is_graph_safe_cuda_rng_tracker", lambda tracker: True)
    _, default, tracker = copied_rng_states()
    for copied, live in ((default, states[1]), (tracker["model"], states[2]["model"])):
        first = torch.rand(4, generator=live)
        assert torch.equal(torch.rand(4, generator=copied), first)


@pytest.mark.usefixtures("args")
def test_what_forwards_count_in_buffers_counts_once() -> None:
    module = torch.nn.BatchNorm1d(2)
    module(torch.randn(4, 2))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    saved = Restart([module])
    module(torch.randn(4, 2))
    assert module.num_batches_tracked == 2
    saved.apply()
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


@pytest.mark.usefixtures("args")
def test_a_buffer_that_a_forward_replaces_gets_its_value_and_its_place_back() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("latest", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            self.latest = x
            return x

    module = Counting()
    module(torch.ones(1))
    module.latest, count = None, module.count
    saved = Restart([module])
    module(torch.ones(1))
    saved.apply()
    assert module.count is count
    assert count == 1
    assert module.latest is None


@pytest.mark.usefixtures("args")
@pytest.mark.parametrize("draw", [lambda: torch.rand(1).item(), random.random, np.random.rand])
def test_data_that_are_random_continue_after_a_restart_as_without_a_restart(draw: Callable[[], float]) -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = [draw() for _ in range(5)]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    saved = Restart([])
    (data, also), (rewindable,) = make_rewindable([iter(draw, None)] * 2)
    assert [next(data), next(also), draw()] == expected[:3], "the last number is drawn by the model"
    saved.apply()
    rewindable.rewind()
    assert [next(also), next(data), draw(), next(data), next(data)] == expected


@pytest.mark.usefixtures("args")
def test_data_that_were_read_after_other_random_numbers_draw_none_again() -> None:
    data = RewindableIterator(iter(lambda: torch.rand(1).item(), None))
    first = next(data)
    torch.manual_seed(3)
    data.rewind()
    assert next(data) == first
    following = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(following, torch.rand(1))
