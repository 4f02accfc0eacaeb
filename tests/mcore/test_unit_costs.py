"""After a failed measurement of the model's units, the job goes on as if nothing had been measured."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from split_layers import one_rank

from megatron.zero_bubble.mcore.unit_costs import UnmeasuredError, count_states, measure_model
from megatron.zero_bubble.mcore.vocabulary_size import check_vocabulary_size


def test_an_error_restores_ranks_and_random_states() -> None:
    def build(*args: object, **options: object) -> None:
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
        assert parallel_state._MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE == 1
        torch.rand(3)
        random.get_cuda_rng_tracker().add("added", 77)
        raise ValueError("not in DDP")

    with one_rank():
        random.model_parallel_cuda_manual_seed(1)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match="not in DDP"):
            count_states(mock.Mock(build=build), [0])
        assert torch.equal(torch.get_rng_state(), state)
        random.get_cuda_rng_tracker().add("added", 77)  # as the model itself will do
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 2
        assert parallel_state._MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is None
        assert parallel_state._MPU_PIPELINE_MODEL_PARALLEL_RANK is None


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            IndexError("there is\n  no layer"),
            UnmeasuredError,
            "the costs of the model cannot be measured: IndexError: there is no layer",
        ),
        (
            ValueError("two layers, please"),
            UnmeasuredError,
            "the costs of the model cannot be measured: ValueError: two layers, please",
        ),
    ],
)
def test_an_error_of_the_users_model_is_one_line(error: Exception, raised: type[Exception], message: str) -> None:
    models = mock.Mock(build=mock.Mock(side_effect=error))
    with one_rank(), pytest.raises(raised, match=f"^{message}$"):
        measure_model(models, [0], mock.Mock(), timedelta(seconds=1), 0.0)


def test_settings_that_this_package_refuses_are_not_taken_for_an_error_of_the_model() -> None:
    def build(*args: object, **options: object) -> None:
        check_vocabulary_size(7, 2, 1)

    with one_rank(), pytest.raises(ValueError, match=r"^--zero-bubble-vocabulary-parallel") as refusal:
        measure_model(mock.Mock(build=build), [0], mock.Mock(), timedelta(seconds=1), 0.0)
    assert not isinstance(refusal.value, UnmeasuredError)
