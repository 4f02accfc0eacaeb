from __future__ import annotations

import statistics

import pytest
import torch

from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.profiler import ChunkCosts, Profiler, combine_costs
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.schedule import Op, OpKind, Placement

F, B, W, BW, R = OpKind.F, OpKind.B, OpKind.W, OpKind.BW, OpKind.R
LINEAR = Placement("linear", 2)
SPEC = TensorSpec((2, 3), torch.float32, torch.device("cpu"))


def step(*ops: tuple[OpKind, int, float, int | None]) -> list[MeasuredOp]:
    """(kind, chunk, milliseconds, bytes) of every operation."""
    return [MeasuredOp(Op(kind, 0, chunk), 1.0, 1.0 + ms / 1000, held) for kind, chunk, ms, held in ops]


def test_times_are_medians_in_milliseconds_and_memory_medians_in_bytes():
    profiler = Profiler(LINEAR, rank=1)
    for f, b, w, held in ((2.0, 3.0, 1.0, 100), (4.0, 3.5, 1.5, 120), (3.0, 2.5, 0.5, 110)):
        profiler.add(step((F, 0, f, held), (B, 0, b, -held // 2), (W, 0, w, -held // 2)))
    (costs,) = profiler.costs()
    assert costs.stage == 1
    assert costs.times == {F: pytest.approx(3.0), B: pytest.approx(3.0), W: pytest.approx(1.0)}
    assert costs.memory == {F: 110, B: -55, W: -55}


def test_of_microbatches_that_differ_in_length_the_mean_counts():
    profiler = Profiler(LINEAR, rank=0)
    for tokens in (1, 1, 7):
        profiler.add(step((F, 0, 1.0 * tokens, 10 * tokens), (B, 0, 2.0 * tokens, 0), (W, 0, 1.0, -10 * tokens)))
    (costs,) = profiler.costs(statistics.fmean)
    assert costs.times == {F: pytest.approx(3.0), B: pytest.approx(6.0), W: pytest.approx(1.0)}
    assert costs.memory == {F: 30, B: 0, W: -30}


def test_of_what_operations_need_inside_the_most_counts():
    """A stage's memory inside operations is the most over its F, B and W, over steps and over replicas."""
    placement = Placement("v", 2, 2)

    def measured(rank: int, *inside: int) -> tuple[list[ChunkCosts], dict]:
        profiler = Profiler(placement, rank)
        for chunk in (0, 1):
            kinds = zip((F, B, W), inside, strict=True)
            profiler.add([MeasuredOp(Op(kind, 0, chunk), 1.0, 2.0, 0, most * (1 + chunk)) for kind, most in kinds])
        profiler.add(step((F, 0, 1.0, 0)))
        return profiler.costs(), {}

    combined = combine_costs(placement, [measured(0, 1, 9, 2), measured(1, 0, 0, 3), measured(0, 10, 0, 0)])
    assert combined.inside == (10, 3, 6, 20)


def held(kind: OpKind, microbatch: int, num_bytes: int) -> MeasuredOp:
    return MeasuredOp(Op(kind, microbatch), 1.0, 1.004 if kind is R else 1.001, num_bytes)


def test_r_is_measured_apart_and_f_as_one_that_keeps_everything():
    """A dropping F holds 10 and its R restores 90; of an F that keeps 101 the drop tells nothing more."""
    backwards = [held(kind, microbatch, -50) for kind in (B, W) for microbatch in (0, 1)]
    dropping, mixed = Profiler(LINEAR, 0), Profiler(LINEAR, 0)
    dropping.add([held(F, 0, 10), held(F, 1, 10), held(R, 0, 90), held(R, 1, 90), *backwards])
    mixed.add([held(F, 0, 10), held(F, 1, 101), held(R, 0, 90), *backwards])
    for profiler, all_of_it in ((dropping, 100), (mixed, 101)):
        (costs,) = profiler.costs()
        assert costs.memory == {F: all_of_it, B: -50, W: -50, R: 90}
        assert (costs.times[F], costs.times[R]) == (pytest.approx(1.0), pytest.approx(4.0))
    combined = combine_costs(Placement("linear", 1), [(dropping.costs(), {})]).costs
    assert (combined.time_r, combined.memory_f, combined.memory_r) == ((pytest.approx(4.0),), (100,), (90,))


def test_where_nothing_is_recomputed_r_costs_nothing():
    costs, *_ = combine_costs(LINEAR, [([chunk(0, 1, 1, 1)], {}), ([chunk(1, 1, 1, 1)], {})])
    assert (costs.time_r, costs.memory_r) == ((0.0, 0.0), (0.0, 0.0))


def test_outliers_move_nothing_but_the_noise_is_told():
    quiet, noisy = Profiler(LINEAR, 0), Profiler(LINEAR, 0)
    for k in range(20):
        quiet.add(step((F, 0, 2.0, None), (B, 0, 2.0, None), (W, 0, 1.0, None)))
        slow = 500.0 if k == 0 else 2.0
        noisy.add(step((F, 0, slow, None), (B, 0, 1.0 + k % 2, None), (W, 0, 1.0, None)))
    assert noisy.costs()[0].times[F] == pytest.approx(2.0)
    assert quiet.costs()[0].noise == pytest.approx(0.0, abs=1e-9)
    # B is 1 or 2 in turn: the quartiles are 1 and 2, the median 1.5.
    assert noisy.costs()[0].noise == pytest.approx(0.5 / 1.5)


def test_the_noise_of_an_operation_too_short_to_matter_is_not_told():
    profiler = Profiler(LINEAR, 0)
    for k in range(20):
        profiler.add(step((F, 0, 2.0, None), (BW, 0, 4.0, None), (OpKind.E, 0, 0.01 + 0.01 * (k % 2), None)))
    (costs,) = profiler.costs()
    assert costs.noise == pytest.approx(0.0, abs=1e-9)
    assert costs.times[OpKind.E] == pytest.approx(0.015)


def test_one_sample_has_no_spread():
    profiler = Profiler(LINEAR, 0)
    profiler.add(step((F, 0, 2.0, None), (B, 0, 2.0, None), (W, 0, 1.0, None)))
    assert profiler.costs()[0].noise == 0.0


def test_memory_that_was_not_measured_is_zero():
    profiler = Profiler(LINEAR, 0)
    profiler.add(step((F, 0, 2.0, None), (BW, 0, 2.0, None)))
    assert profiler.costs()[0].memory == {F: 0, BW: 0}


def test_every_chunk_is_a_stage_of_its_own():
    profiler = Profiler(Placement("v", 2, 2), rank=0)
    profiler.add(step(*[(kind, chunk, 1.0 + chunk, 0) for chunk in (0, 1) for kind in (F, B, W)]))
    costs = profiler.costs()
    assert [c.stage for c in costs] == [0, 3], "in a V the first and the last stage share rank 0"
    assert [c.times[F] for c in costs] == [pytest.approx(1.0), pytest.approx(2.0)]


def chunk(stage: int, f: float, b: float, w: float, memory: float = 100.0, noise: float = 0.0) -> ChunkCosts:
    return ChunkCosts(stage, {F: f, B: b, W: w}, {F: memory, B: -memory / 4, W: -memory * 3 / 4}, noise)


def test_of_replicas_the_slowest_and_the_fullest_counts():
    gathered = [
        ([chunk(0, 1.0, 2.0, 3.0, noise=0.01)], {0: 0.25}),
        ([chunk(1, 5.0, 5.0, 5.0)], {0: 0.5}),
        ([chunk(0, 2.0, 1.0, 3.5, memory=120.0, noise=0.03)], {0: 0.125}),
        ([chunk(1, 4.0, 6.0, 5.0, noise=0.02)], {}),
    ]
    costs, noise, *_ = combine_costs(LINEAR, gathered)
    assert (costs.time_f, costs.time_b, costs.time_w) == ((2.0, 5.0), (2.0, 6.0), (3.5, 5.0))
    assert costs.time_comm == (0.5,)
    assert costs.memory_f == (120.0, 100.0)
    assert costs.memory_b == (-30.0, -25.0)
    assert costs.memory_w == (-90.0, -75.0), "what F keeps is released by B and W"
    assert noise == 0.03


def test_edges_within_a_rank_cost_nothing():
    placement = Placement("v", 2, 2)
    gathered = [
        ([chunk(0, 1, 1, 1), chunk(3, 1, 1, 1)], {0: 0.5, 2: 0.25}),
        ([chunk(1, 1, 1, 1), chunk(2, 1, 1, 1)], {0: 0.5, 2: 0.25}),
    ]
    assert combine_costs(placement, gathered)[0].time_comm == (0.5, 0.0, 0.25)


def test_a_fused_backward_counts_half_and_half():
    fused = ChunkCosts(0, {F: 1.0, BW: 4.0}, {F: 10.0, BW: -10.0}, 0.0)
    costs, *_ = combine_costs(Placement("linear", 1), [([fused], {})])
    assert (costs.time_f, costs.time_b, costs.time_w) == ((1.0,), (2.0,), (2.0,))
    assert (costs.memory_f, costs.memory_b, costs.memory_w) == ((10.0,), (-5.0,), (-5.0,))


def test_where_some_backwards_are_split_the_fused_ones_tell_nothing_more():
    mixed = ChunkCosts(0, {F: 1.0, B: 3.0, W: 1.5, BW: 4.0}, {F: 8.0, B: -2.0, W: -6.0, BW: -8.0}, 0.0)
    costs, *_ = combine_costs(Placement("linear", 1), [([mixed], {})])
    assert (costs.time_b, costs.time_w, costs.memory_b, costs.memory_w) == ((3.0,), (1.5,), (-2.0,), (-6.0,))


def test_of_pairs_nothing_is_known_about_either_operation():
    profiler = Profiler(LINEAR, rank=0)
    alone = step((F, 0, 2.0, 10), (B, 0, 3.0, -5), (W, 0, 1.0, -5))
    profiler.add([*alone, MeasuredOp(Op(F, 1), 2.0, 2.0, 10), MeasuredOp(Op(OpKind.PB, 0), 2.0, 2.004, 0)])
    (costs,) = profiler.costs()
    assert costs.times == {F: pytest.approx(2.0), B: pytest.approx(3.0), W: pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("pair", "hidden"),
    [(8.0, 1.0), (9.0, 0.5), (9.9, 0.0), (10.3, 0.0)],
    ids=["hidden", "half hidden", "below the least gain", "longer"],
)
@pytest.mark.parametrize("kind", [OpKind.PB, OpKind.PBW])
def test_of_exchanges_counts_the_part_by_which_pairs_are_shorter_than_their_parts(kind, pair, hidden):
    """F and B take 5 each, of which 1 is exchanged: one after the other 10, and 8 if all is hidden. W takes none."""
    profiler = Profiler(LINEAR, rank=0)
    alone = [
        MeasuredOp(Op(F, 0), 0.0, 0.005, exchanged=0.001),
        MeasuredOp(Op(B, 1), 0.0, 0.005, exchanged=0.001),
        MeasuredOp(Op(W, 1), 0.0, 1e-12),
    ]
    profiler.add([*alone, MeasuredOp(Op(F, 1), 2.0, 2.0), MeasuredOp(Op(kind, 0), 2.0, 2.0 + pair / 1000)])
    (costs,) = profiler.costs()
    assert costs.exchanged == {F: pytest.approx(hidden, abs=1e-6), B: pytest.approx(hidden, abs=1e-6)}
    combined = combine_costs(Placement("linear", 1), [([costs], {})])
    assert combined.ratio_of_pairs == pytest.approx(pair / 10)
    assert combined.costs.time_of_pair(0, OpKind.PB, 0) == pytest.approx(10 - 2 * hidden, rel=1e-6)


def test_without_pairs_no_exchange_counts():
    profiler = Profiler(LINEAR, rank=0)
    profiler.add([MeasuredOp(Op(kind, 0), 0.0, 0.005, exchanged=0.002) for kind in (F, B, W)])
    (costs,) = profiler.costs()
    assert costs.exchanged == {F: 0.0, B: 0.0}
    assert combine_costs(Placement("linear", 1), [([costs], {})]).ratio_of_pairs is None


def test_exchanges_are_the_fastest_replicas_and_a_part_of_f_and_b():
    def costs_of(exchanged_f: float, exchanged_b: float) -> ChunkCosts:
        times = {F: 4.0, B: 5.0, W: 1.0}
        return ChunkCosts(0, times, {F: 2, B: -1, W: -1}, 0.0, exchanged={F: exchanged_f, B: exchanged_b})

    combined = combine_costs(Placement("linear", 1), [([costs_of(2.0, 6.0)], {}), ([costs_of(1.5, 7.0)], {})])
    assert combined.costs.all_to_all_f == (1.5,)
    assert combined.costs.all_to_all_b == (5.0,)
