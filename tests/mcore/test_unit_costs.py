"""After a failed measurement of the model's units, the job goes on as if nothing had been measured."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from split_layers import one_rank

from megatron.zero_bubble.mcore.unit_costs import UnmeasuredError, count_states, failing_together


def test_an_error_restores_ranks_and_random_states() -> None:
    def build(*args: object, **options: object) -> None:
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
        assert parallel_state._MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE == 1
        torch.rand(3)
        raise ValueError("not in DDP")

    with one_rank():
        parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match="not in DDP"):
            count_states(mock.Mock(build=build), [0])
        assert torch.equal(torch.get_rng_state(), state)
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 2
        assert parallel_state._MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is None
        assert parallel_state._MPU_PIPELINE_MODEL_PARALLEL_RANK is None


def test_an_error_of_the_users_model_is_one_line_on_all_ranks() -> None:
    with one_rank():
        reason = r"^the costs of the model cannot be measured: IndexError: there is no layer$"
        with pytest.raises(UnmeasuredError, match=reason), failing_together():
            raise IndexError("there is\n  no layer")
        with pytest.raises(ValueError, match=r"^as it is$"), failing_together():
            raise ValueError("as it is")
        with failing_together():
            pass
