from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron.zero_bubble.runtime.planning import BroadcastPlan, MemoryLimit, Prediction, one_f_one_b_peak
from megatron.zero_bubble.schedule import Placement, ScheduleError, StageCosts, generate, simulate
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.plan import FixedPlan, NamedPlan

GIB = 2**30


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("1", MemoryLimit(multiple=1.0)),
        ("1.5", MemoryLimit(multiple=1.5)),
        ("1.5x", MemoryLimit(multiple=1.5)),
        (" 2X ", MemoryLimit(multiple=2.0)),
        ("40GiB", MemoryLimit(num_bytes=40 * GIB)),
        ("0.5 gib", MemoryLimit(num_bytes=GIB // 2)),
        ("300MiB", MemoryLimit(num_bytes=300 * 2**20)),
        ("300MB", MemoryLimit(num_bytes=300 * 10**6)),
        ("2GB", MemoryLimit(num_bytes=2 * 10**9)),
        ("7KiB", MemoryLimit(num_bytes=7 * 1024)),
        ("7kb", MemoryLimit(num_bytes=7000)),
        ("123456B", MemoryLimit(num_bytes=123456)),
        ("auto", MemoryLimit()),
        ("AUTO", MemoryLimit()),
    ],
)
def test_a_limit_is_a_multiple_or_bytes_or_auto(text, limit):
    assert MemoryLimit.parse(text) == limit


@pytest.mark.parametrize(
    "text", ["", "much", "0", "-1", "0GiB", "-2GiB", "nan", "inf", "infGiB", "GiB", "4TiBs", "1.5y", "1e308", "1e30GiB"]
)
def test_anything_else_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        MemoryLimit.parse(text)
    assert str(error.value) == (
        f"{text!r} is no memory limit: give a multiple of 1F1B's peak (1.5), bytes (40GiB) or auto"
    )


def uneven(placement: Placement, **more) -> StageCosts:
    """Every stage costs something else."""
    n = placement.num_stages
    times = [tuple(1.0 + (s * k % 5) / 4 for s in range(n)) for k in (1, 2, 3)]
    memory = tuple(100.0 + 10.0 * (s * 3 % 4) for s in range(n))
    return StageCosts(
        *times, (0.125,) * (n - 1), memory, tuple(-m / 4 for m in memory), tuple(-m * 3 / 4 for m in memory)
    )


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_the_peak_of_1f1b_is_that_of_simulate(p, m):
    placement = Placement("linear", p)
    costs = uneven(placement)
    simulated = simulate(generate("1f1b", p, m), costs).peak_memory
    assert one_f_one_b_peak(placement, costs, m) == pytest.approx(max(simulated))


def test_the_peak_of_1f1b_counts_all_chunks_of_a_rank():
    """What 1F1B would take with the same layers on every rank, as one stage each."""
    placement = Placement("v", 2, 2)
    costs = replace(uneven(placement), memory_f=(1.0, 10.0, 100.0, 1000.0))
    assert one_f_one_b_peak(placement, costs, 8) == max(2 * 1001.0, 1 * 110.0)


def test_a_limit_in_bytes_of_measured_costs():
    placement = Placement("linear", 2)
    costs = StageCosts.uniform(2, memory_f=100.0, memory_b=-50.0, memory_w=-50.0)
    assert MemoryLimit(multiple=1.5).in_bytes(placement, costs, 8, None) == 300.0
    assert MemoryLimit(multiple=1.5).in_bytes(placement, costs, 1, None) == 150.0
    assert MemoryLimit(num_bytes=777).in_bytes(placement, costs, 8, None) == 777
    assert MemoryLimit().in_bytes(placement, costs, 8, 555) == 555


def test_auto_keeps_room_for_what_an_operation_needs_inside():
    placement = Placement("v", 2, 2)
    profile = Profile(placement, StageCosts.uniform(4), 0.0, {}, inside=(100.0, 7.0, 8.0, 200.0))
    assert MemoryLimit().of_ranks(555, 2, profile) == (355.0, 547.0)
    assert MemoryLimit().of_ranks(150, 2, profile) == (1.0, 142.0), "no room on the first rank"
    assert MemoryLimit(num_bytes=777).of_ranks(777, 2, profile) == (777, 777)
    for unknown in (None, replace(profile, inside=())):
        assert MemoryLimit().of_ranks(555, 2, unknown) == (555, 555)


def test_a_limit_before_anything_is_measured():
    """In M_B, where 1F1B needs one for every rank, and no more than there are microbatches."""
    assert MemoryLimit(multiple=1.5).in_unit_costs(4, 8) == 6.0
    assert MemoryLimit(multiple=1.5).in_unit_costs(4, 2) == 3.0
    assert MemoryLimit(num_bytes=777).in_unit_costs(4, 8) is None
    assert MemoryLimit().in_unit_costs(4, 8) is None


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_a_prediction_is_what_simulate_finds(name):
    placement = Placement("linear", 4)
    costs = uneven(placement)
    timeline = simulate(generate(name, 4, 8), costs)
    prediction = Prediction(Profile(placement, costs, 0.0, {}), NamedPlan(name, 4).schedule(8))
    assert prediction.bubble_rate == timeline.bubble_rate
    assert prediction.milliseconds == timeline.makespan
    assert prediction.peak_bytes == timeline.peak_memory
    assert prediction.speed_up == pytest.approx(simulate(generate("1f1b", 4, 8), costs).cost / timeline.cost)


def test_the_speed_up_compares_with_1f1b_of_the_same_layers_a_rank():
    """Interleaved 1F1B's bubble is (p-1)(F+B+W)/v of a rank's work: with p = 2, v = 2, m = 4, 9/8 against 10/8."""
    placement = Placement("interleaved", 2, 2)
    profile = Profile(placement, StageCosts.uniform(4), 0.0, {})
    prediction = Prediction(profile, NamedPlan("interleaved-1f1b", 2).schedule(4))
    assert prediction.speed_up == pytest.approx((4 + 1) / (4 + 0.5))


def test_a_broadcast_plan_is_the_plan(one_rank):
    plan = NamedPlan("zb-h1", 2)
    broadcast = BroadcastPlan(plan)
    assert (broadcast.name, broadcast.placement) == (plan.name, plan.placement)
    assert broadcast.schedule(4) == plan.schedule(4)


def test_a_broadcast_plan_makes_each_schedule_once(one_rank):
    broadcast = BroadcastPlan(NamedPlan("zb-h1", 2))
    assert broadcast.schedule(4) is broadcast.schedule(4)
    assert broadcast.schedule(8).num_microbatches == 8


def test_what_the_first_rank_cannot_plan_is_everyones_error(one_rank):
    with pytest.raises(ScheduleError, match="is for 4 microbatches, not for 8"):
        BroadcastPlan(FixedPlan(generate("zb-h1", 2, 4))).schedule(8)
