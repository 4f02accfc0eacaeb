from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble.session.start_up import SessionError
from megatron.zero_bubble.trainer.records import NumericsLog, parameter_digest


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_chunk(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    chunk = torch.nn.Linear(3, 2).to(dtype)
    for parameter in chunk.parameters():
        torch.nn.init.constant_(parameter, 0.3)
    return chunk


def write(path: Path, *iterations: int, after: int = 0) -> None:
    log = NumericsLog(str(path), after, log_rank=0)
    for iteration in iterations:
        log.write(iteration, 0.1 * iteration, 1.0 / iteration, parameter_digest([make_chunk()]))


class TestDigest:
    def test_equal_parameters_have_equal_digests(self):
        assert parameter_digest([make_chunk()]) == parameter_digest([make_chunk()])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_it_sees_the_last_bit_of_any_parameter(self, dtype):
        chunk = make_chunk(dtype)
        before = parameter_digest([chunk])
        seen = {before}
        for parameter in chunk.parameters():
            for index in range(parameter.numel()):
                value = parameter.data.view(-1)[index]
                parameter.data.view(-1)[index] = torch.nextafter(value, torch.tensor(torch.inf, dtype=dtype))
                seen.add(parameter_digest([chunk]))
                parameter.data.view(-1)[index] = 0.3
        assert len(seen) == 1 + sum(parameter.numel() for parameter in chunk.parameters())

    def test_it_sees_every_chunk_and_their_order(self):
        first, second = make_chunk(), make_chunk()
        torch.nn.init.ones_(second.bias)
        digests = {parameter_digest(chunks) for chunks in ([first], [first, second], [second, first])}
        assert len(digests) == 3

    def test_a_parameter_without_dimensions_or_with_strides(self):
        chunk = torch.nn.Module()
        chunk.scale = torch.nn.Parameter(torch.tensor(2.0))
        chunk.turned = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        straight = torch.nn.Module()
        straight.scale = torch.nn.Parameter(torch.tensor(2.0))
        straight.turned = torch.nn.Parameter(chunk.turned.detach().contiguous())
        assert parameter_digest([chunk]) == parameter_digest([straight])


class TestFile:
    def test_a_line_holds_exact_values(self, tmp_path):
        write(tmp_path / "n.jsonl", 3)
        entry = json.loads((tmp_path / "n.jsonl").read_text())
        assert list(entry) == ["iteration", "lm_loss", "grad_norm", "parameters"]
        assert entry["iteration"] == 3
        assert float.fromhex(entry["lm_loss"]) == 0.1 * 3
        assert float.fromhex(entry["grad_norm"]) == 1.0 / 3
        assert entry["parameters"] == [parameter_digest([make_chunk()])], "one digest a rank"

    def test_what_is_unknown_is_null(self, tmp_path):
        NumericsLog(str(tmp_path / "n.jsonl"), 0, log_rank=0).write(1, None, None, "digest")
        entry = json.loads((tmp_path / "n.jsonl").read_text())
        assert (entry["lm_loss"], entry["grad_norm"]) == (None, None)

    def test_not_a_number_can_be_written_and_read(self, tmp_path):
        NumericsLog(str(tmp_path / "n.jsonl"), 0, log_rank=0).write(1, float("nan"), float("inf"), "digest")
        entry = json.loads((tmp_path / "n.jsonl").read_text())
        assert (entry["lm_loss"], entry["grad_norm"]) == ("nan", "inf")

    def test_a_new_run_starts_a_new_file(self, tmp_path):
        write(tmp_path / "n.jsonl", 1, 2)
        write(tmp_path / "n.jsonl", 1)
        assert len((tmp_path / "n.jsonl").read_text().splitlines()) == 1

    @pytest.mark.parametrize("left", ["", '{"iteration": 4, "lm_lo', "{"])
    def test_a_resumed_run_ends_with_the_file_of_one_that_never_stopped(self, tmp_path, left):
        write(tmp_path / "whole.jsonl", *range(1, 7))
        cut = tmp_path / "cut.jsonl"
        write(cut, 1, 2, 3)
        with open(cut, "a") as file:
            file.write(left)  # killed while it wrote
        write(cut, 3, 4, 5, 6, after=2)  # the checkpoint was of iteration 2
        assert cut.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()

    def test_a_resumed_run_may_log_to_a_file_that_is_not_there(self, tmp_path):
        write(tmp_path / "n.jsonl", 5, after=4)
        assert json.loads((tmp_path / "n.jsonl").read_text())["iteration"] == 5

    @pytest.mark.parametrize("line", ["[1]", "1", "{}", '{"iteration": null}', "hello", '{"step": 1', "\xff"])
    def test_a_resumed_run_refuses_and_keeps_a_file_of_another_kind(self, tmp_path, line):
        path = tmp_path / "n.jsonl"
        path.write_bytes(f"{line}\n".encode("latin-1"))
        with pytest.raises(SessionError, match=f"^--log-numerics {path}: line 1 was not written by --log-numerics"):
            write(path, 3, after=2)
        assert path.read_bytes() == f"{line}\n".encode("latin-1")
