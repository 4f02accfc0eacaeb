"""An error on one rank is raised on all ranks, or ends the failed rank while other ranks wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.zero_bubble.runtime.joint import from_all_ranks, jointly
from tests.ranks import be_rank, run_on_ranks
from tests.trainings import process_group


def run_rank(rank: int, num_ranks: int, waits: bool, folder: Path, port: int) -> None:
    """Rank 1 fails; with `waits`, rank 0 waits inside of the action until rank 1 has raised its error."""
    be_rank(rank, num_ranks)
    store = dist.TCPStore("localhost", port)

    def action() -> None:
        if rank == 1:
            raise ValueError("the layer fails") from KeyError("a name")
        if waits:
            store.wait(["raised"])

    with process_group(rank, num_ranks, store):
        errors: list[str] = []
        for _ in range(1 if waits else 2):
            try:
                jointly(action, patience=2)
            except (ValueError, KeyError) as error:
                errors.append(repr(error))
            if waits and rank == 1:
                store.set("raised", "")
                from_all_ranks(None)  # in the place of the call that rank 1 has left
        (folder / str(rank)).write_text("\n".join(errors))


@pytest.mark.parametrize(
    ("waits", "expected"),
    [(False, [["ValueError('the layer fails')"] * 2] * 2), (True, [[""], ["KeyError('a name')"]])],
)
def test_a_failed_rank_waits_for_the_others_for_a_limited_time(waits: bool, expected: list[list[str]], tmp_path: Path):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, run_rank, (waits, tmp_path, store.port), timeout=60) == 0
    assert [(tmp_path / str(rank)).read_text().split("\n") for rank in range(2)] == expected
