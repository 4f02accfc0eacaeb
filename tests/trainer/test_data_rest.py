"""What a checkpoint's run has left of the data must last to the end: otherwise the resumed run does not begin."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data import check_rest, requested_samples
from tests.checked_flags import data_flags


def config(**settings: object) -> Arguments:
    """A hundred iterations of eight samples, with an evaluation of two such batches after every tenth."""
    defaults = {
        "seq_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 100,
        "eval_interval": 10,
        "eval_iters": 2,
        "mock_data": True,
    }
    return data_flags(**(defaults | settings))


def used_by(run: Arguments, iteration: int) -> tuple[int, int]:
    """Training and validation samples that this run had used."""
    evaluations = iteration // run.eval_interval
    assert run.global_batch_size is not None
    return iteration * run.global_batch_size, evaluations * run.eval_iters * run.global_batch_size


def refusal(resumed: Arguments, iteration: int, used: tuple[int, int]) -> str:
    """The one line that refuses to resume, where the data has just the samples that the run asked for."""
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        check_rest(resumed, requested_samples(resumed), iteration, used)
    return str(error.value)


@pytest.mark.parametrize("iteration", [0, 1, 9, 10, 11, 55, 99, 100])
def test_a_run_goes_on_with_its_own_flags(iteration: int) -> None:
    run = config()
    check_rest(run, requested_samples(run), iteration, used_by(run, iteration))


@pytest.mark.parametrize(
    "changes", [{"train_iters": 200}, {"train_iters": 60}, {"global_batch_size": 16}, {"eval_interval": 5}]
)
def test_changes_that_the_data_lasts_for(changes: dict[str, int]) -> None:
    resumed = config(**changes)
    check_rest(resumed, requested_samples(resumed), 50, used_by(config(), 50))


def test_a_smaller_batch_makes_less_data_than_is_used_up_already() -> None:
    assert refusal(config(global_batch_size=4), 50, used_by(config(eval_iters=0), 50)) == (
        "--global-batch-size 4: the train data has 400 samples for this, of which the run in --load has used 400, and "
        "200 more are needed: give that run's values"
    )


def test_fewer_evaluations_make_less_validation_data_than_is_used_up_already() -> None:
    assert refusal(config(eval_interval=30), 50, used_by(config(), 50)) == (
        "--eval-interval 30 --eval-iters 2 --global-batch-size 8: the valid data has 64 samples for this, of which the "
        "run in --load has used 80, and 32 more are needed: give that run's values, or --eval-iters 0"
    )


@pytest.mark.parametrize("changes", [{"eval_iters": 0}, {"eval_interval": 1000}])
def test_validation_data_counts_only_where_it_is_read(changes: dict[str, object]) -> None:
    resumed = config(**changes)
    check_rest(resumed, requested_samples(resumed), 50, used_by(config(), 50))


def test_a_run_without_validation_data_goes_on() -> None:
    resumed = config(eval_interval=30)
    check_rest(resumed, (requested_samples(resumed)[0], 0, 0), 50, used_by(config(), 50))
