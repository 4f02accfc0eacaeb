"""The random states of a unit: those that megatron-core would set, and restored after a model is built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random
from split_layers import make_config, one_rank

from megatron.zero_bubble.mcore import unit_seeds
from megatron.zero_bubble.mcore.unit_seeds import drawn_by_unit, initialized_by_unit


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


def test_states_are_those_that_megatron_core_sets():
    seed = 2**62 + 7
    random.model_parallel_cuda_manual_seed(seed)
    expected = {"default-rng": torch.cuda.get_rng_state(), **random.get_cuda_rng_tracker().get_states()}
    found = unit_seeds._generator_states(seed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_building_a_model_leaves_the_random_states_as_they_were():
    random.model_parallel_cuda_manual_seed(1)
    before = (torch.get_rng_state(), torch.cuda.get_rng_state(), random.get_cuda_rng_tracker().get_states())
    with initialized_by_unit(5, is_first_stage=True):
        first = torch.rand(3)
    with initialized_by_unit(5, is_first_stage=True):
        assert torch.equal(torch.rand(3), first)
    with initialized_by_unit(5, is_first_stage=False):
        assert not torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])
    after = random.get_cuda_rng_tracker().get_states()
    assert all(torch.equal(after[name], state) for name, state in before[2].items())


def test_a_generator_that_a_model_adds_stays():
    """Multi-token prediction of megatron-core 0.20 adds a generator, from which its forwards draw."""
    random.model_parallel_cuda_manual_seed(1)
    with initialized_by_unit(5, is_first_stage=True):
        random.get_cuda_rng_tracker().add("added", 77)
    with random.get_cuda_rng_tracker().fork("added"):
        torch.rand(1)


def test_dropout_depends_on_the_iteration_and_the_microbatch():
    config = make_config()
    assert config.hidden_dropout > 0
    model = GPTModel(config, get_gpt_layer_local_spec(), 128, 16, pre_process=True, post_process=False)
    positions = torch.arange(8)[None]
    iteration = 1

    def output(microbatch: int) -> torch.Tensor:
        model.current_microbatch = microbatch
        return model(positions, positions, None).detach()

    with drawn_by_unit(5, [model], lambda: iteration):
        first = output(0)
        assert torch.equal(output(0), first)
        assert not torch.equal(output(1), first)
        iteration = 2
        assert not torch.equal(output(0), first)


def test_seeds_of_units_differ():
    numbers = [(seed, unit, number) for seed in range(20) for unit in unit_seeds._UnitKind for number in range(20)]
    assert len({unit_seeds._mixed(*entry) for entry in numbers}) == len(numbers)


def test_routers_that_draw_their_logits_are_seeded_too():
    config = make_config()
    config.hidden_dropout = config.attention_dropout = 0.0
    model = GPTModel(config, get_gpt_layer_local_spec(), 128, 16, pre_process=True, post_process=False)
    for draws in (False, True):
        config.moe_router_force_load_balancing = draws
        with drawn_by_unit(5, [model], lambda: 1):
            assert bool(model._forward_pre_hooks) is draws


def test_other_models_are_refused_even_without_dropout():
    refused = r"^--zero-bubble-seed-by-layer needs megatron-core's GPTModel or \w+, got Linear: leave it out$"
    with pytest.raises(ValueError, match=refused), drawn_by_unit(5, [torch.nn.Linear(1, 1)], lambda: 1):
        pass
