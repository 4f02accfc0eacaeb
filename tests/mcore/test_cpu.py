from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from types import FunctionType

import pytest
import torch

from megatron.zero_bubble.mcore.cpu import ENVIRONMENT, CpuSubstitution, substitute_cuda, substitutions

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nothing is substituted")

LISTED = list(substitutions())
OWNERS = [torch, torch.cuda, torch.cuda.nvtx, torch.cuda.random, torch.Tensor, torch.nn.Module]
OWNERS += [entry.owner for entry in LISTED]


def snapshot() -> list[dict[str, object]]:
    return [dict(owner.__dict__) for owner in OWNERS]


@pytest.fixture
def pristine() -> list[dict[str, object]]:
    """What the modules held before the test. Earlier tests may have left state of megatron-core in them."""
    return snapshot()


@pytest.fixture
def substituted(pristine) -> Iterator[CpuSubstitution]:
    substitution = substitute_cuda()
    yield substitution
    substitution.restore()


def owner_name(owner: object) -> str:
    return getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or f"logger {owner.name}"


def test_every_substitution_says_why_and_stands_once():
    for entry in LISTED:
        assert len(entry.reason) > 10
        assert "\n" not in entry.reason
    counts = Counter((owner_name(entry.owner), entry.name) for entry in LISTED)
    assert counts.most_common(1)[0][1] == 1


def test_no_function_replaces_two():
    """Dynamo keeps the functions of torch by their identity."""
    in_torch = [entry.replacement for entry in LISTED if owner_name(entry.owner).startswith("torch")]
    functions = [each for each in in_torch if isinstance(each, FunctionType)]
    assert len(functions) == len(set(functions)) > 3


def test_it_is_exactly_what_is_listed_that_changes(pristine, substituted):
    after = snapshot()
    substituted.restore()
    before = snapshot()
    assert before == pristine
    changed = {
        (owner_name(owner), name)
        for owner, old, new in zip(OWNERS, before, after, strict=True)
        for name in new
        if new[name] is not old.get(name, substituted)
    }
    assert changed == {(owner_name(entry.owner), entry.name) for entry in LISTED}


@pytest.mark.parametrize("value_of_the_user", [None, "0"])
def test_restore_leaves_nothing_behind(pristine, value_of_the_user, monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
        if value_of_the_user is not None:
            monkeypatch.setenv(name, value_of_the_user)
    environment = dict(os.environ)
    substitution = substitute_cuda()
    for name, value in ENVIRONMENT.items():
        assert os.environ[name] == (value_of_the_user or value)
    substitution.restore()
    substitution.restore()
    assert snapshot() == pristine
    assert dict(os.environ) == environment


def test_one_inside_another_is_undone_from_the_inside(pristine):
    outer, inner = substitute_cuda(), substitute_cuda()
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    inner.restore()
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    outer.restore()
    assert snapshot() == pristine


def test_a_type_has_the_name_of_one_substitution_also_inside_another(pristine, substituted):
    inner = substitute_cuda()
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    inner.restore()
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"


def test_on_a_machine_with_cuda_nothing_is_touched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before, environment = snapshot(), dict(os.environ)
    substitution = substitute_cuda()
    assert snapshot() == before
    substitution.restore()
    assert snapshot() == before
    assert dict(os.environ) == environment


@pytest.mark.usefixtures("substituted")
class TestWhatMegatronCoreAsksOfCuda:
    @pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)], ids=str)
    @pytest.mark.parametrize(
        ("factory", "arguments"),
        [
            *[("zeros", (2,)), ("ones", (2,)), ("empty", (2,)), ("full", ((2,), 3)), ("arange", (2,)), ("eye", 2)],
            *[("rand", (2,)), ("randn", (2,)), ("randint", (5, (2,))), ("tensor", ([1.0],))],
        ],
    )
    def test_a_tensor_on_the_gpu_is_one_on_the_cpu(self, factory, arguments, device):
        arguments = arguments if isinstance(arguments, tuple) else (arguments,)
        assert getattr(torch, factory)(*arguments, device=device).device.type == "cpu"

    def test_memory_is_not_pinned_for_a_copy_that_there_is_not(self):
        assert torch.tensor([1, 2], device="cpu", pin_memory=True).cuda().tolist() == [1, 2]

    def test_other_devices_are_left_alone(self):
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.zeros(2).device.type == "cpu"

    def test_moving_to_the_gpu_moves_nothing(self):
        tensor, module = torch.zeros(2), torch.nn.Linear(2, 2)
        assert tensor.cuda() is tensor
        assert tensor.cuda(0, non_blocking=True) is tensor
        assert module.cuda(torch.cuda.current_device()) is module

    def test_the_optimizers_names_of_types(self):
        """`clip_grads` compares names; `FP32Optimizer` and `count_zeros` build tensors by type."""
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.cuda.FloatTensor([1.5]).dtype == torch.float32
        assert torch.zeros(1).type(torch.int64).dtype == torch.int64

    def test_streams_and_events_are_in_order_already(self):
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            torch.cuda.current_stream().wait_stream(stream)
            event.record(torch.cuda.current_stream())
            stream.wait_event(event)
        event.synchronize()
        assert event.query()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push("F0")
        torch.cuda.nvtx.range_pop()

    def test_modules_draw_from_the_device_s_generator(self):
        dropout = torch.nn.Dropout()
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first, second = dropout(torch.ones(64)), dropout(torch.ones(64))
        assert not torch.equal(first, second)
        torch.cuda.set_rng_state(state)
        assert torch.equal(dropout(torch.ones(64)), first)
        torch.manual_seed(3)
        assert torch.equal(dropout(torch.ones(64)), first), "it seeds all devices"

    def test_other_draws_move_the_cpu_s_generator_alone(self):
        """A data loader draws from the CPU's generator, and a resumed run opens one more; dropout must not notice."""
        dropout, samples = torch.nn.Dropout(), torch.utils.data.DataLoader(range(4))
        torch.manual_seed(3)
        drawn = torch.rand(4)
        masks = [dropout(torch.ones(64)) for _ in range(2)]
        torch.manual_seed(3)
        assert torch.equal(dropout(torch.ones(64)), masks[0])
        assert torch.equal(torch.rand(4), drawn)
        assert list(samples) == [0, 1, 2, 3]
        assert torch.equal(dropout(torch.ones(64)), masks[1])

    def test_a_module_in_a_module_draws_in_turn(self):
        one = torch.nn.Dropout()
        torch.cuda.manual_seed(3)
        expected = one(one(torch.ones(64)))
        torch.cuda.manual_seed(3)
        assert torch.equal(torch.nn.Sequential(one, one)(torch.ones(64)), expected)

    def test_one_inside_another_is_the_same_device(self):
        dropout = torch.nn.Dropout()
        torch.cuda.manual_seed(3)
        expected = [dropout(torch.ones(64)) for _ in range(2)]
        torch.cuda.manual_seed(3)
        inner = substitute_cuda()
        found = [dropout(torch.ones(64))]
        inner.restore()
        found.append(dropout(torch.ones(64)))
        assert torch.equal(torch.stack(found), torch.stack(expected))

    def test_an_error_in_a_module_leaves_both_generators_in_place(self):
        before = torch.get_rng_state()
        with pytest.raises(TypeError):
            torch.nn.Dropout()(None)
        assert torch.equal(torch.get_rng_state(), before)

    def test_megatron_cores_tracker_forks_it(self, caplog):
        """Inside the fork all draws come from it, because weights are initialised outside of modules' calls."""
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        tracker, dropout = CudaRNGStatesTracker(), torch.nn.Dropout()
        tracker.add("model-parallel-rng", 11)
        before, device_before = torch.get_rng_state(), torch.cuda.get_rng_state()
        with caplog.at_level(logging.WARNING), tracker.fork("model-parallel-rng"):
            inside, mask = torch.rand(4), dropout(torch.ones(64))
        assert torch.equal(torch.get_rng_state(), before), "outside, the numbers go on as if nothing had been drawn"
        assert torch.equal(torch.cuda.get_rng_state(), device_before)
        with tracker.fork("model-parallel-rng"):
            assert not torch.equal(torch.rand(4), inside), "the fork goes on where it was"
        torch.default_generator.manual_seed(11)
        assert torch.equal(torch.rand(4), inside)
        torch.cuda.set_rng_state(torch.get_rng_state())
        assert torch.equal(dropout(torch.ones(64)), mask)
        assert caplog.records == []


def test_torchs_profiler_knows_the_modules(substituted, tmp_path):
    """It finds a module in the variable `self` of what is called for `torch.nn.Module.__call__`."""
    module = torch.nn.Linear(2, 2)
    with torch.profiler.profile(with_stack=True, with_modules=True) as profiler:
        module(torch.ones(2))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "nn.Module: Linear_0" in (tmp_path / "trace.json").read_text()
