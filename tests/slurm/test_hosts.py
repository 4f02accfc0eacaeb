"""A pipeline over two hosts with addresses of their own: what the profiler measures is what the cable does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.zero_bubble.schedule.formats import profile_from_json
from tests.launch import PRETRAIN, environment
from tests.slurm.hosts import TwoHosts, missing

SEQUENCE, HIDDEN = 256, 256
MESSAGE_BITS = SEQUENCE * HIDDEN * 4 * 8
MEGABITS = 40
RATE = f"tbf rate {MEGABITS}mbit burst 16kb latency 2s"
AT_THIS_RATE = MESSAGE_BITS / (MEGABITS * 1e6) * 1000.0
"""Milliseconds that one message takes at this rate, without headers."""
DELAY = 60.0
FLAGS = [
    *("--num-layers", "4", "--hidden-size", str(HIDDEN), "--num-attention-heads", "4", "--seq-length", str(SEQUENCE)),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "4", "--lr", "1e-3", "--mock-data"),
    *("--vocab-size", "120", "--log-interval", "1", "--eval-iters", "0"),
    *("--pipeline-model-parallel-size", "4", "--zero-bubble", "--zero-bubble-profile-iters", "2", "3"),
]


def train(hosts: TwoHosts, folder: Path) -> tuple[list[float], str]:
    """Four ranks, two on each host: milliseconds of every edge as the profiler measured them, and what was printed."""
    profile, first = folder / "profile.json", hosts.hosts[0]
    jobs = []
    for host in hosts.hosts:
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.name}:29400", "--rdzv-id", "hosts"),
            *("--local-addr", host.address, str(PRETRAIN), *FLAGS, "--zero-bubble-profile-output", str(profile)),
        ]
        jobs.append(host.start(launcher, environment(), folder / host.name))
    statuses = [job.wait(timeout=500) for job in jobs]
    output = "".join((folder / host.name).read_text() for host in hosts.hosts)
    assert statuses == [0, 0], output
    return list(profile_from_json(profile.read_text()).costs.time_comm), output


def skip_without(*qdiscs: str) -> pytest.MarkDecorator:
    problem = missing(*qdiscs)
    return pytest.mark.skipif(problem is not None, reason=problem or "")


@skip_without(RATE)
def test_the_bandwidth_between_hosts_is_what_the_profiler_measures(tmp_path: Path) -> None:
    with TwoHosts(RATE) as hosts:
        (here, between, there), output = train(hosts, tmp_path)
        assert f"host {hosts.hosts[0].name} holds stages 0-1 on ranks 0-1" in output
        assert f"host {hosts.hosts[1].name} holds stages 2-3 on ranks 2-3" in output
    # The bucket lets 16 kB of 262 kB pass at once, and headers are 5% of a packet.
    assert between == pytest.approx(AT_THIS_RATE, rel=0.25)
    assert max(here, there) < between / 2


@skip_without(f"netem delay {DELAY:g}ms")
def test_the_latency_between_hosts_is_what_the_profiler_measures(tmp_path: Path) -> None:
    with TwoHosts(f"netem delay {DELAY:g}ms limit 10000") as hosts:
        (here, between, there), _ = train(hosts, tmp_path)
    # A message of many packets may wait for an acknowledgement or two on its way.
    assert DELAY <= between < 4 * DELAY
    assert max(here, there) < DELAY / 2
