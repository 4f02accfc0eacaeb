"""A layout with several model chunks a rank is chosen only for a script that builds and feeds several chunks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from unittest import mock

import pytest

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.script_choice import (
    build_layout,
    check_chunk_functions,
    settle_layout,
    validate_arguments,
)
from megatron.zero_bubble.launcher.script_settings import flags_of
from megatron.zero_bubble.mcore.unit_costs import UnmeasuredError
from megatron.zero_bubble.planner import Layout
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.layout_choice import ChosenLayout, saved_choice
from megatron.zero_bubble.session.layout_words import flags_of_layout
from megatron.zero_bubble.session.settings import job_settings
from megatron.zero_bubble.session.start_up import SessionError
from tests.launcher.script_flags import script_arguments


def builds_one_chunk(pre_process: bool, post_process: bool) -> None: ...
def builds_chunks(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> None: ...
def builds_by_options(**options: object) -> None: ...
def makes_data_for_one_chunk(num_samples: tuple[int, ...]) -> None: ...
def makes_data_for_chunks(num_samples: tuple[int, ...], vp_stage: int | None = None) -> None: ...


def settled(
    model_provider: Callable[..., None],
    data_provider: Callable[..., None],
    units: mock.Mock | None = None,
    **arguments: int,
) -> mock.Mock:
    """Settle the layout of a script under `--zero-bubble`; return the script's session."""
    script = script_arguments(padded_vocab_size=128, **arguments)
    session = mock.Mock(job=mock.Mock(flags=flags_of(script, LaunchFlags())))
    signature = inspect.signature(lambda model_provider_func: None)
    setup = Call(pytest.fail, signature.bind(model_provider))
    settle_layout(script, None, session, units or mock.Mock(), setup, data_provider)
    return session


@pytest.mark.parametrize(
    ("model_provider", "data_provider", "restricted"),
    [
        (builds_chunks, makes_data_for_chunks, {}),
        (builds_by_options, makes_data_for_chunks, {}),
        (builds_one_chunk, makes_data_for_chunks, {"zero_bubble_placement": "linear"}),
        (builds_chunks, makes_data_for_one_chunk, {"zero_bubble_placement": "linear"}),
    ],
)
def test_functions_without_vp_stage_restrict_the_choice_to_one_chunk(
    model_provider: Callable[..., None], data_provider: Callable[..., None], restricted: dict[str, str]
) -> None:
    [choice] = settled(model_provider, data_provider).choose_layout.call_args_list
    placement = {name: value for name, value in choice.kwargs.items() if name == "zero_bubble_placement"}
    assert placement == restricted


@pytest.mark.parametrize(
    ("model_provider", "data_provider", "named"),
    [
        (builds_one_chunk, makes_data_for_chunks, "model_provider"),
        (builds_chunks, makes_data_for_one_chunk, "train_valid_test_dataset_provider"),
    ],
)
def test_flags_that_ask_for_chunks_are_refused(
    model_provider: Callable[..., None], data_provider: Callable[..., None], named: str
) -> None:
    chunks = {"virtual_pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    reason = rf"^--num-virtual-stages-per-pipeline-rank 2: the script's {named} has no parameter vp_stage"
    with pytest.raises(SessionError, match=reason):
        settled(model_provider, data_provider, **chunks)
    setup = Call(pytest.fail, inspect.signature(lambda model_provider_func: None).bind(model_provider))
    flags = flags_of(script_arguments(**chunks), LaunchFlags(zero_bubble_schedule="interleaved-zb"))
    named = reason.replace("num-virtual-stages-per-pipeline-rank 2", "zero-bubble-schedule interleaved-zb")
    with pytest.raises(SessionError, match=named):
        check_chunk_functions(setup, data_provider, mock.Mock(flags=flags, placement=Placement("interleaved", 4, 2)))
    check_chunk_functions(setup, data_provider, mock.Mock(flags=flags, placement=Placement("linear", 4)))


def test_megatrons_layout_is_kept_if_the_costs_of_the_model_cannot_be_measured() -> None:
    units = mock.Mock()
    units.measure.side_effect = UnmeasuredError("the costs of the model cannot be measured: IndexError")
    with mock.patch("megatron.zero_bubble.launcher.script_choice.check_chunks"):
        session = settled(builds_chunks, makes_data_for_chunks, units)
    session.keep_megatrons_layout.assert_called_once_with("the costs of the model cannot be measured: IndexError")
    session.choose_layout.assert_not_called()


@pytest.mark.parametrize("keeps", [False, True])
def test_no_shards_are_chosen_for_a_model_with_its_own_embedding_output_layer_or_loss(keeps: bool) -> None:
    units = mock.Mock(shapes_vary=False, keeps_vocabulary=keeps)
    [choice] = settled(builds_chunks, makes_data_for_chunks, units).choose_layout.call_args_list
    assert (choice.kwargs.get("zero_bubble_vocabulary_parallel") == "off") == keeps


@pytest.mark.parametrize("defaults", [{"micro_batch_size": 2}, {}])
def test_a_micro_batch_size_may_be_a_default_of_the_script(defaults: dict[str, int]) -> None:
    """`pretrain(args_defaults=...)` passes defaults to `validate_args`, which sets them."""
    script = script_arguments(micro_batch_size=None)
    bound = inspect.signature(lambda args, defaults: None).bind(script, defaults)
    call = Call(lambda args, defaults: args, bound)
    if defaults:
        assert validate_arguments(LaunchFlags(zero_bubble=True), call) is script
        assert script.micro_batch_size == 2
        return
    with pytest.raises(SessionError, match=r"^--micro-batch-size is missing: give the number of sequences"):
        validate_arguments(LaunchFlags(zero_bubble=True), call)


LIMITS = (100.0, 200.0, 200.0, 100.0)
"""The memory limits, in bytes, under which the layout was chosen."""


@pytest.mark.parametrize(("was", "now"), [("1.5", "1.5"), ("1.5", None), (None, "1.5"), (None, None)])
def test_a_resumed_script_keeps_the_limits_of_its_layout_with_the_same_memory_limit(
    was: str | None, now: str | None
) -> None:
    saved = script_arguments(use_distributed_optimizer=False)
    layout = flags_of_layout(Layout(Placement("v", 4, 2), (1,) * 8))
    choice = ChosenLayout({**layout, "zero_bubble_layout_limits": LIMITS})
    flags, resumed = (LaunchFlags(zero_bubble=True, zero_bubble_memory_limit=limit) for limit in (was, now))
    job = job_settings(flags_of(saved, flags), {}, has_cuda=False, choice=choice)
    build_layout(saved, Call(pytest.fail, inspect.signature(lambda: None).bind()), job, mock.Mock())
    restored = saved_choice(saved, flags_of(script_arguments(use_distributed_optimizer=False), resumed))
    assert restored is not None
    assert restored.flags["zero_bubble_layout_limits"] == (LIMITS if was == now else None)


@pytest.mark.parametrize("fit", [True, False])
def test_megatrons_layout_is_kept_for_states_of_a_distributed_optimizer_only_if_they_fit(fit: bool) -> None:
    checkpoint = mock.Mock(is_continued=False, other_format=None, keeps_optimizers_layout=True)
    checkpoint.check_stages.side_effect = None if fit else SessionError("they fit another layout")
    session = mock.Mock()
    refused = contextlib.nullcontext() if fit else pytest.raises(SessionError, match=r"^they fit another layout$")
    with mock.patch("megatron.zero_bubble.launcher.script_choice.check_chunks"), refused:
        settle_layout(script_arguments(), checkpoint, session, mock.Mock(), {})
    assert session.keep_megatrons_layout.called is fit


def test_states_that_are_on_the_host_already_are_not_offloaded() -> None:
    """megatron-core would end in a KeyError in the first step."""
    call = Call(vars, inspect.signature(lambda args: None).bind(script_arguments(optimizer_cpu_offload=True)))
    with pytest.raises(SessionError, match=r"^--optimizer-cpu-offload needs a GPU, because .*: leave it out$"):
        validate_arguments(LaunchFlags(zero_bubble_schedule="zb-h1", zero_bubble_cpu=True), call)
