"""Times and memory of operations are fitted to the sizes of their microbatches."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.runtime.size_profile import SizeProfile, sized_costs
from megatron.zero_bubble.schedule import Op, OpKind, Placement, StageCosts
from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize, SizedCosts

SIZES = [MicrobatchSize.of([length]) for length in (3, 8, 20, 5)]
USUAL = StageCosts.uniform(2, time_comm=0.5)


def measured(
    kind: OpKind, microbatch: int, milliseconds: float, memory_change: float | None = None, inside: int = 0
) -> MeasuredOp:
    return MeasuredOp(Op(kind, microbatch), 1.0, 1.0 + milliseconds / 1000, memory_change, inside)


def fitted(ops: list[MeasuredOp], sizes: list[MicrobatchSize] | None = None) -> SizedCosts:
    """The costs that rank 0 of two finds alone."""
    profile = SizeProfile(Placement("linear", 2), 0)
    profile.note(1, sizes or SIZES)
    profile.collect(1, ops)
    costs = sized_costs(profile._samples, USUAL)
    assert costs is not None
    return costs


def test_times_with_a_constant_a_linear_and_a_quadratic_part_are_found():
    def time(size: MicrobatchSize) -> float:
        return 2 + 0.3 * size.tokens + 0.05 * size.squares

    costs = fitted([measured(OpKind.F, k, time(size)) for k, size in enumerate(SIZES)])
    for size in (*SIZES, MicrobatchSize.of([10, 10])):
        assert costs.of(size).time_f[0] == pytest.approx(time(size), rel=1e-6)


def test_pairs_do_not_count():
    """In a pair of a forward and a backward, the backward has the whole time, and the forward none."""
    alone = [measured(OpKind.F, k, 3.0) for k in range(3)]
    pair = [measured(OpKind.F, 3, 0.0), measured(OpKind.PBW, 0, 90.0)]
    costs = fitted([*alone, *pair], [SIZES[0]] * 4)
    assert costs.of(SIZES[0]).time_f[0] == pytest.approx(3.0)
    assert costs.of(SIZES[0]).time_b[0] == pytest.approx(USUAL.time_b[0])


def test_no_part_is_below_zero():
    """Noise must not make a long microbatch shorter."""
    costs = fitted([measured(OpKind.F, k, 10 - k) for k in range(4)])
    short, long = (costs.of(MicrobatchSize.of([length])).time_f[0] for length in (1, 1000))
    assert 0 < short <= long


def test_memory_that_is_released_is_below_zero():
    ops = [measured(OpKind.B, k, 1.0, -4.0 * size.tokens) for k, size in enumerate(SIZES)]
    assert fitted(ops).of(MicrobatchSize.of([10])).memory_b[0] == pytest.approx(-40)


def test_a_fused_backward_counts_half_as_b_and_half_as_w():
    costs = fitted([measured(OpKind.BW, k, 2.0 * size.tokens) for k, size in enumerate(SIZES)])
    of_ten = costs.of(MicrobatchSize.of([10]))
    assert (of_ten.time_b[0], of_ten.time_w[0]) == (pytest.approx(10), pytest.approx(10))


def test_a_stage_without_samples_is_in_proportion_to_tokens():
    costs = fitted([measured(OpKind.F, k, 1.0) for k in range(4)])
    mean = sum(size.tokens for size in SIZES) / 4
    assert costs.of(MicrobatchSize(round(2 * mean), 0)).time_f[1] == pytest.approx(2 * USUAL.time_f[1], rel=0.03)
    assert costs.of(SIZES[0]).time_comm == USUAL.time_comm


def test_sizes_that_are_all_alike_fit():
    sizes = [MicrobatchSize.of([6])] * 4
    costs = fitted([measured(OpKind.F, k, 3.0) for k in range(4)], sizes)
    assert costs.of(sizes[0]).time_f[0] == pytest.approx(3.0)


def test_what_a_forward_drops_counts_as_kept():
    ops = [measured(OpKind.F, 0, 1.0, 5.0), measured(OpKind.R, 0, 1.0, 7.0)]
    profile = SizeProfile(Placement("linear", 2), 0)
    profile.note(1, SIZES)
    profile.collect(1, ops)
    assert [sample.memory_change for sample in profile._samples[0, OpKind.F]] == [12.0]
    assert [sample.memory_change for sample in profile._samples[0, OpKind.R]] == [7.0]


def test_memory_inside_is_that_of_the_operation_that_needs_the_most():
    ops = [measured(OpKind.F, k, 1.0, 0.0, inside=3 * size.squares) for k, size in enumerate(SIZES)]
    ops += [measured(OpKind.B, k, 1.0, 0.0, inside=size.tokens) for k, size in enumerate(SIZES)]
    first, second = fitted(ops).inside
    assert first.at(MicrobatchSize.of([100])) == pytest.approx(30_000)
    assert second.at(MicrobatchSize.of([100])) == 0


def test_a_rank_sends_samples_of_all_sizes_but_not_all_samples():
    """Each of a job's ranks, which may be thousands, gets the samples of all others."""
    sizes = [MicrobatchSize.of([length]) for length in range(1, 1001)]
    profile, sent = SizeProfile(Placement("linear", 2), 0), []
    profile.note(1, sizes)
    profile.collect(1, [measured(OpKind.F, k, 3.0 * size.tokens) for k, size in enumerate(sizes)])
    costs = profile.fit(USUAL, lambda samples: sent.append(samples) or [samples])
    assert costs.of(sizes[499]).time_f[0] == pytest.approx(1500)
    tokens = [sample.size.tokens for sample in sent[0][0, OpKind.F]]
    assert (len(tokens), tokens[0], tokens[-1]) == (128, 1, 1000)
    assert max(b - a for a, b in pairwise(tokens)) <= 8


def test_steps_whose_sizes_are_not_known_are_left_out():
    profile = SizeProfile(Placement("linear", 2), 0)
    profile.collect(1, [measured(OpKind.F, 0, 1.0)])
    assert sized_costs(profile._samples, USUAL) is None


def test_of_stages_that_restore_groups_of_layers_only_the_times_of_f_are_known():
    """B contains parts of R and W there, and F keeps less than without recomputation."""
    profile = SizeProfile(Placement("linear", 2), 0)
    profile.note(1, SIZES, groups=(2, 1))
    profile.collect(1, [measured(kind, k, 9.0, 100.0) for kind in (OpKind.F, OpKind.B, OpKind.W) for k in range(4)])
    costs = sized_costs(profile._samples, USUAL)
    assert costs is not None
    mean = MicrobatchSize(9, 81)
    assert costs.of(mean).time_f[0] == pytest.approx(9)
    for name in ("time_b", "time_w", "memory_f", "memory_b"):
        assert getattr(costs.of(mean), name)[0] == pytest.approx(getattr(USUAL, name)[0])
