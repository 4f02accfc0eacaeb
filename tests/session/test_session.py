"""What a `Session` does by itself; whole runs of it are the trainings of `tests/end_to_end` and `tests/launcher`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Infeasible, Placement
from megatron.zero_bubble.session import session as session_module
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.session.settings import JobSettings
from megatron.zero_bubble.session.start_up import SessionError
from megatron.zero_bubble.trainer.arguments import parse_arguments
from tests.launch import TINY_GPT


def job(schedule: str | None = None, *more: str) -> JobSettings:
    """The settings of two pipeline ranks."""
    given = parse_arguments([*TINY_GPT, "--pipeline-model-parallel-size", "2", *more])
    plan = RunSchedules.named(schedule, 2) if schedule is not None else None
    return JobSettings(JobFlags.of(given), plan, Placement("linear", 2), (2, 2))


def test_a_session_under_megatron_cores_schedule_splits_nothing() -> None:
    session = Session(job(), "test")
    layer = torch.nn.Linear(2, 2)
    session.split([layer])
    assert session.store is None


def test_layers_are_split_into_the_store_of_the_session() -> None:
    session = Session(job("zb-h1"), "test")
    with mock.patch.object(session_module, "split_weight_gradients") as split:
        session.split([])
    split.assert_called_once_with([], session.store)
    assert isinstance(session.store, WeightGradStore)


def test_a_step_without_a_schedule_under_the_limit_is_one_line() -> None:
    def run(**arguments: Any) -> list[Any]:
        raise Infeasible("7 GiB are needed", 7.0)

    session = Session(job("auto", "--zero-bubble", "--zero-bubble-memory-limit", "1.5"), "test")
    session.run = run
    with pytest.raises(SessionError, match=r"^--zero-bubble-memory-limit 1\.5: 7 GiB are needed$"):
        session.forward_backward(model=[])


def test_a_forward_step_that_the_layout_does_not_support_is_one_line() -> None:
    session = Session(job("zb-h1"), "test")
    session.run = mock.Mock(side_effect=ForwardStepError("stage 1 sends a tuple"))
    with pytest.raises(SessionError, match=r"^stage 1 sends a tuple$"):
        session.forward_backward(model=[], num_microbatches=2)
    assert session.num_steps == 0


def test_a_session_counts_the_training_steps_after_those_of_earlier_runs() -> None:
    session = Session(job("zb-h1"), "test")
    session.run, session.iteration = mock.Mock(return_value=[]), 7
    session.forward_backward(num_microbatches=2)
    session.forward_backward(num_microbatches=4, forward_only=True)
    assert (session.num_steps, session.iteration, session.num_microbatches) == (1, 8, 2)


def test_what_is_known_of_the_model_restricts_the_choice_of_a_layout() -> None:
    """A script may turn out to have microbatches of several lengths, for which no vocabulary is spread."""
    session = Session(job("auto", "--zero-bubble"), "test")

    def search(flags: JobFlags, *more: Any) -> Any:
        raise ValueError(f"with the vocabulary {flags.zero_bubble_vocabulary_parallel}")

    with (
        mock.patch.object(session_module, "new_choice", search),
        pytest.raises(ValueError, match=r"^with the vocabulary off$"),
    ):
        session.choose_layout(mock.Mock(), 1024, zero_bubble_vocabulary_parallel="off")


def test_what_was_changed_is_undone_after_an_error() -> None:
    undone: list[str] = []

    def fail() -> None:
        with Session(job(), "test") as session:
            session._resources.callback(undone.append, "seeds")
            raise RuntimeError("a step failed")

    with pytest.raises(RuntimeError, match="a step failed"):
        fail()
    assert undone == ["seeds"]


def test_a_second_close_does_nothing() -> None:
    session = Session(job("zb-h1"), "test")
    run = mock.Mock()
    session.forward_backward_func = run
    session.close()
    session.close()
    run.close.assert_called_once_with()


def test_a_session_that_builds_has_the_store_that_it_is_given() -> None:
    store, flags = WeightGradStore(2), job().flags
    session = Session.to_build(flags, Placement("v", 2, 2), store)
    assert (session.store, session.job.placement.kind, session.job.plan) == (store, "v", None)
