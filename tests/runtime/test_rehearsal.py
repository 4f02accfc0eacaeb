"""Rehearsals run the schedules of contenders with real messages, and with matrix products in place of layers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime import rehearsal
from megatron.zero_bubble.runtime.communicator import TensorSpec, TorchCommunicator
from megatron.zero_bubble.runtime.rehearsal import Contender, Work, rehearse
from megatron.zero_bubble.schedule import Placement, StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.recomputation import Recompute
from tests.ranks import run_on_ranks
from tests.trainings import process_group

MESSAGE = TensorSpec((6, 2, 8), torch.float32, torch.device("cpu"))
LINEAR, V = Placement("linear", 2), Placement("v", 2, 2)
SHARD = {"time_e": 1, "time_ew": 2, "time_s": 3, "time_t": 1, "memory_s": 1, "memory_t": -1}


def contenders() -> dict[str, Contender]:
    whole, in_v = default_costs(LINEAR, Recompute.FULL), default_costs(V).with_shards(V, SHARD)
    short = Contender(generate("1f1b", 2, 4), whole)
    return {
        "1f1b": short,
        "20 times as long": replace(short, costs=scaled(whole, 20)),
        "R": Contender(generate("zb-h1", 2, 4, recompute=Recompute.FULL), whole),
        "shards": Contender(generate("zb-v", 2, 4, costs=in_v, vocabulary_parallel=True), in_v, interlocks=True),
    }


def scaled(costs: StageCosts, factor: float) -> StageCosts:
    names = ("time_f", "time_b", "time_w")
    return replace(costs, **{name: tuple(factor * time for time in getattr(costs, name)) for name in names})


class Noted(Work):
    """Adds up the time for which it is told to compute."""

    total = 0.0

    def run(self, milliseconds: float) -> None:
        self.total += milliseconds


def run_all(rank: int, num_ranks: int, port: int) -> None:
    with process_group(rank, num_ranks, dist.TCPStore("localhost", port)):
        given = contenders()
        where = (dist.group.WORLD, MESSAGE, TorchCommunicator, timedelta(seconds=60))
        times = dict(zip(given, rehearse([*given.values()], *where, seconds=0), strict=True))
        everyone = [times] * num_ranks
        dist.all_gather_object(everyone, times)
        assert everyone == [times] * num_ranks
        assert min(times.values()) > 0
        assert times["20 times as long"] > 4 * times["1f1b"]

        rehearsal._FEWEST_ROUNDS, rehearsal._MOST_ROUNDS, rehearsal._INTERLOCKED_STEPS = 1, 1, 1
        for contender in given.values():
            work = Noted()
            rehearsal._calibrated_work = lambda work=work: work
            rehearse([contender], *where, seconds=0)
            placement, durations = contender.schedule.placement, contender.costs.times()
            ops = contender.schedule.ops[rank]
            step = sum(durations[op.kind][placement.stage_of(rank, op.chunk)] for op in ops if op.kind in durations)
            assert work.total == pytest.approx(2 * step), contender.schedule.name


def test_every_operation_of_a_contender_takes_its_time_and_all_ranks_know_the_slowest_rank_s_time():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, run_all, (store.port,), timeout=120) == 0


def test_the_remainder_of_a_short_operation_is_computed_by_a_later_one(monkeypatch):
    products = []
    monkeypatch.setattr(torch, "mm", lambda *matrices, out: products.append(out))
    work, counts = Work(milliseconds=0.4), []
    for _ in range(4):
        work.run(1.0)
        counts.append(len(products))
    assert counts == [2, 5, 7, 10]
