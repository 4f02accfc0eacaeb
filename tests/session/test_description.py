"""What a run says at start-up about gradients that are not deferred."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.zero_bubble.mcore.linear import split_weight_gradients
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.session.description import describe
from megatron.zero_bubble.session.flags import check_zero_bubble_flags
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.reports import unsplit_line
from megatron.zero_bubble.session.settings import JobSettings
from megatron.zero_bubble.trainer.arguments import parse_arguments
from tests.launch import TINY_GPT
from tests.mcore.deferring_layer import DeferringLayers, DeferringLinear
from tests.mcore.split_layers import HIDDEN, OUTPUT, Layers, one_rank

PLAN = RunSchedules.named("zb-h1", 2)


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


def job(*flags: str, plan: RunSchedules | None = PLAN) -> JobSettings:
    given = parse_arguments([*TINY_GPT, "--pipeline-model-parallel-size", "2", *flags])
    return JobSettings(JobFlags.of(given), plan, PLAN.placement, (2, 2))


def model(*, is_split: bool) -> list[Any]:
    layers = Layers()
    if is_split:
        split_weight_gradients([layers], WeightGradStore())
    return [torch.nn.Sequential(layers, torch.nn.Embedding(1, 48))]


def test_a_rank_says_where_its_gradients_are_computed(capsys):
    describe(job(), model(is_split=True))
    assert capsys.readouterr().out.splitlines() == [
        " > number of parameters on each pipeline rank: 856",
        " > W is deferred for 100.0% of the weights, without embeddings, norms and biases",
        " > pipeline schedule: zb-h1",
    ]


def test_modules_that_are_not_split_are_named_with_their_share(capsys):
    describe(job("--zero-bubble-no-strict"), model(is_split=False))
    lines = [line for line in capsys.readouterr().out.splitlines() if "not split" in line]
    assert len(lines) == 2
    assert lines[0] == (
        " > WARNING: not split, its weight's gradient is computed in B: *.column (ColumnParallelLinear), "
        "44.86% of a rank's parameters"
    )


def test_a_share_that_hardly_matters_is_no_warning():
    assert "WARNING" not in unsplit_line("router (TopKRouter)", 0.001)


def test_strict_refuses_what_is_not_split():
    describe(job("--zero-bubble-strict"), model(is_split=True))
    with pytest.raises(
        ValueError, match=r"^--zero-bubble-strict: weight gradients of \*\.column \(ColumnPar.*cannot be"
    ):
        describe(job("--zero-bubble-strict"), model(is_split=False))


def test_linear_layers_that_are_not_split_are_refused_unless_a_flag_allows_them(capsys):
    half = DeferringLayers()
    half.first = DeferringLinear(HIDDEN, OUTPUT, delay_wgrad_compute=False, fuse_wgrad_accumulation=False)
    split_weight_gradients([half], WeightGradStore())
    with pytest.raises(
        ValueError, match=r"^W is not deferred for first \(DeferringLinear\): .*--zero-bubble-no-strict"
    ):
        describe(job(), [half])
    describe(job("--zero-bubble-no-strict"), [half])
    assert capsys.readouterr().out.count(" > W is deferred for 50.0% of the weights") == 2


def test_a_module_that_is_no_linear_layer_is_named_and_trained(capsys):
    router = torch.nn.Module()
    router.weight = torch.nn.Parameter(torch.zeros(4, 48))
    describe(job(), [torch.nn.ModuleDict({"layers": model(is_split=True)[0], "router": router})])
    said = capsys.readouterr().out
    assert " > WARNING: not split, its weight's gradient is computed in B: router (Module), 18.3" in said
    with pytest.raises(ValueError, match="contradict each other"):
        check_zero_bubble_flags(job("--zero-bubble", "--zero-bubble-strict", "--zero-bubble-no-strict").flags)


def test_without_a_schedule_of_ours_nothing_is_deferred_or_missed(capsys):
    describe(job(plan=None), model(is_split=False))
    assert capsys.readouterr().out.splitlines() == [
        " > number of parameters on each pipeline rank: 856",
        " > pipeline schedule: megatron-core (1F1B)",
    ]
