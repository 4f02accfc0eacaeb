"""Compare schedules as `zero-bubble benchmark` does; --peers adds other implementations of schedules.

    python -m benchmarks.train --pipeline-size 2 --num-microbatches 4 --schedule zb-h1 --schedule zb-2p --peers -- \\
        --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 \\
        --micro-batch-size 2 --mock-data --vocab-size 4095

The peers are megatron-core's interleaved schedule and the schedules of torch.distributed.pipelining, with the same
layers, data, optimizer and loop (benchmarks/pretrain_gpt_torch.py). `--peers megatron-core` leaves out
torch.distributed.pipelining. `zero-bubble benchmark --help` describes the measurements. For a schedule of
torch.distributed.pipelining, the column `predicted` has a bubble rate only if one of this project's schedules has the
same order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.emulation.peers import ONE_CHUNK, peer_placements
from megatron.zero_bubble.cli.benchmark.arguments import BenchmarkFlags
from megatron.zero_bubble.cli.benchmark.contestants import CHUNKS_FLAG, Contestant, megatrons_interleaved
from megatron.zero_bubble.cli.benchmark_command import benchmark
from megatron.zero_bubble.cli.invocation import command
from megatron.zero_bubble.session.flag_parser import flag

_SAME_ORDER = {**ONE_CHUNK, "Interleaved1F1B": "interleaved-1f1b"}
"""Name of a schedule of torch.distributed.pipelining -> this project's schedule with the same order, whose simulation
predicts the bubble rate and the time."""


@dataclass(frozen=True)
class PeerFlags(BenchmarkFlags):
    """the peers"""

    peers: str | None = flag(
        "run megatron-core's interleaved schedule and torch.distributed.pipelining's schedules as well; "
        "megatron-core: only the former",
        None,
        nargs="?",
        const="all",
        choices=("all", "megatron-core"),
    )


@command("benchmarks.train", PeerFlags, __doc__)
def main(flags: PeerFlags) -> None:
    if flags.peers and flags.pipeline_size is None:
        raise ValueError("argument --peers: needs --pipeline-size")
    benchmark(flags, tuple(peers(flags, with_torch=flags.peers == "all")) if flags.peers else ())


def peers(flags: BenchmarkFlags, *, with_torch: bool = True) -> Iterator[Contestant]:
    """Yield megatron-core's interleaved schedule; `with_torch` adds every schedule of torch.distributed.pipelining."""
    p, chunks = flags.pipeline_size, flags.num_chunks or 2
    yield megatrons_interleaved(flags, chunks, "megatron-core interleaved")
    if not with_torch:
        return
    for name, placement in peer_placements(p, chunks).items():
        more = (CHUNKS_FLAG, str(placement.num_chunks)) if placement.num_chunks > 1 else ()
        program = ("-m", "benchmarks.pretrain_gpt_torch", name)
        yield Contestant(f"torch {name}", program, more, placement, _SAME_ORDER.get(name), is_required=False)


if __name__ == "__main__":
    sys.exit(main())
