"""`enable` in loops over megatron-core that are not Megatron-LM's: the numbers are those of the loop alone."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.loop_run import LoopRun, flags_of_loop
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule.formats import schedule_to_json
from megatron.zero_bubble.session.start_up import SessionError
from tests.launcher.loops import run_rank
from tests.ranks import run_on_ranks

SCHEDULES: dict[str, list[dict[str, Any]]] = {
    "simple": [{"schedule": "zb-h1"}, {}, {"recompute": "planned", "memory_limit": "0.7"}],
    "bridge": [{"schedule": "interleaved-zb"}, {"schedule": "auto", "profile_iters": [1, 1]}],
    "bridge, groups": [{"schedule": "interleaved-1f1b"}],
    "verl": [
        {"schedule": "zb-h1", "microbatch_order": "data"},
        {"schedule": "auto", "profile_iters": [1, 1], "microbatch_order": "data"},
    ],
    "hybrid": [{"schedule": "zb-2p"}],
    "rewrapping": [{"schedule": "zb-h1"}],
    "searching": [{"schedule": "zb-h1"}],
}


def numbers_of(folder: Path, loop: str, settings: dict[str, Any] | None) -> list[list[str]]:
    """The numbers of both ranks."""
    name = f"{loop}-{json.dumps(settings)}".replace("/", "-")
    if not (folder / f"{name}.0.json").exists():
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        status = run_on_ranks(2, run_rank, (loop, settings, folder, name, store.port), timeout=120)
        assert status == 0
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loops")


@pytest.mark.parametrize(
    ("loop", "settings"), [(loop, settings) for loop, each in SCHEDULES.items() for settings in each]
)
def test_numbers_are_those_of_the_loop_alone(folder: Path, loop: str, settings: dict[str, Any]) -> None:
    expected = numbers_of(folder, loop, None)
    assert len(expected[1]) > 3
    assert numbers_of(folder, loop, settings) == expected


def test_a_schedule_from_a_file_is_for_the_loops_number_of_microbatches(folder: Path) -> None:
    (folder / "four.json").write_text(schedule_to_json(generate("zb-h1", 2, 4)))
    assert numbers_of(folder, "simple", {"schedule": "file:four.json"}) == numbers_of(folder, "simple", None)
    (folder / "six.json").write_text(schedule_to_json(generate("zb-h1", 2, 6)))
    line = "--zero-bubble-schedule file:six.json: schedule zb-h1 is for 6 microbatches, not for 4"
    assert numbers_of(folder, "simple", {"schedule": "file:six.json"}) == [[line]] * 2


def test_dropped_models_with_vocabulary_shards_are_freed(folder: Path) -> None:
    """Although the thread of the shards' collectives goes on until the next model is built."""
    numbers = numbers_of(folder, "searching", {"schedule": "zb-h1", "vocabulary_parallel": "on"})
    assert [of_rank[-1] for of_rank in numbers] == ["0 models, 0 more threads"] * 2


def test_a_loop_on_varied_lengths_goes_on_from_what_it_saved(folder: Path) -> None:
    settings, whole = SCHEDULES["verl"][1], numbers_of(folder, "verl", None)
    stopped, resumed = (numbers_of(folder, f"verl, {part}", settings) for part in ("stopped", "resumed"))
    for rank in range(2):
        assert stopped[rank][:-1] + resumed[rank] == whole[rank]


def test_microbatches_of_varied_lengths_run_in_a_planned_order(folder: Path) -> None:
    """From the step on whose costs are measured; results come back in the order of the data."""
    settings = {"schedule": "auto", "profile_iters": [1, 2]}
    in_order, rotated = (numbers_of(folder, f"lengths{order}", None) for order in ("", ", rotated"))
    assert in_order != rotated
    assert numbers_of(folder, "lengths", settings) == rotated
    assert numbers_of(folder, "lengths", {**settings, "microbatch_order": "data"}) == in_order


@pytest.mark.parametrize("more", [{}, {"recompute": "planned"}], ids=["keeps", "recomputes"])
def test_microbatches_that_are_too_long_for_the_plan_run_in_less_memory(folder: Path, more: dict[str, Any]) -> None:
    settings = {"profile_iters": [1, 2], "microbatch_order": "data", "memory_limit": "100KiB", **more}
    assert numbers_of(folder, "long", settings) == numbers_of(folder, "long", None)
    for rank in range(2):
        line = numbers_of(folder, "long", {**settings, "memory_limit": "20KiB"})[rank][0]
        assert "microbatch 0 (17 tokens), keeps" in line


def test_a_loop_that_calls_megatron_cores_function_itself_is_refused(folder: Path) -> None:
    """On the rank that begins, for whose message the other rank waits."""
    line = (
        "the loop trains under megatron-core's own schedule: call get_forward_backward_func() after enable(), and "
        "train with the function that it returns"
    )
    assert numbers_of(folder, "direct", {"schedule": "zb-h1"})[0] == [line]


@pytest.mark.parametrize(
    ("loop", "settings", "line"),
    [
        (
            "simple",
            {"schedule": "zb-2p", "post_validation": True},
            "--zero-bubble-post-validation works with Megatron-LM's trainer alone: post-validation depends on which "
            "steps the loop logs",
        ),
        (
            "bridge",
            {"schedule": "zb-v"},
            "--zero-bubble-schedule zb-v: a V placement works with Megatron-LM's trainer alone",
        ),
        (
            "simple",
            {"schedule": "auto", "profile_output": "/no/such/folder/profile.json"},
            "--zero-bubble-profile-output /no/such/folder/profile.json: its folder does not exist",
        ),
        (
            "simple",
            {"schedule": "interleaved-zb"},
            "--zero-bubble-schedule interleaved-zb: the schedule has 2 model chunks a rank, but the process groups are "
            "for 1: pass virtual_pipeline_model_parallel_size=2 to initialize_model_parallel()",
        ),
    ],
)
def test_what_cannot_work_is_one_line(folder: Path, loop: str, settings: dict[str, Any], line: str) -> None:
    assert numbers_of(folder, loop, settings) == [[line]] * 2


def test_process_groups_that_megatron_core_does_not_know_are_refused() -> None:
    """Megatron-Bridge makes its own groups if its setting says so."""
    build = inspect.signature(lambda config: None).bind(None)
    with pytest.raises(SessionError, match=r"initialize_model_parallel\(\) makes; .* dist\.use_decentralized_pg$"):
        LoopRun(LaunchFlags(zero_bubble_schedule="zb-h1")).build_chunk(Call(lambda config: None, build))


def test_a_loop_has_the_timeout_of_its_groups_and_the_level_of_its_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data", "pipeline_model", "tensor_model", "context", "expert_model"):
        monkeypatch.setattr(parallel_state, f"get_{name}_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    config.timers = SimpleNamespace(_log_level=2)
    flags = flags_of_loop(config, LaunchFlags(zero_bubble_schedule="zb-h1"), 30)
    assert (flags.distributed_timeout_minutes, flags.timing_log_level) == (30, 2)
    config.timers = None
    flags = flags_of_loop(config, LaunchFlags(zero_bubble_schedule="zb-h1"))
    assert (flags.distributed_timeout_minutes, flags.timing_log_level) == (10, 0)
