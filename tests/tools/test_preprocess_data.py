"""tools/preprocess_data.py: what it writes, and that a mistake writes nothing."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
SPEC = importlib.util.spec_from_file_location("preprocess_data", TOOL)
assert SPEC is not None
assert SPEC.loader is not None
preprocess_data = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(preprocess_data)

VOCAB_SIZE = 500
NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]


def write_lines(file: Path, *records: object) -> str:
    """Records become JSON; bytes are written as they are."""
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    file.write_bytes(b"\n".join(lines) + b"\n")
    return str(file)


def run(*flags: str) -> int:
    return preprocess_data.main([*flags, *NUMBERS])


def documents(prefix: Path) -> list[list[list[int]]]:
    """The sequences of each document."""
    dataset = IndexedDataset(str(prefix))
    bounds = dataset.document_indices
    return [[dataset[sequence].tolist() for sequence in range(begin, end)] for begin, end in itertools.pairwise(bounds)]


def test_each_line_becomes_a_document_that_ends_with_end_of_document(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"text": "1 2 3"}, {"text": "4"}, b"", {"text": "", "other": "x"})
    assert run("--input", source, "--output-prefix", str(tmp_path / "out"), "--append-eod") == 0
    prefix = tmp_path / "out_text_document"
    assert documents(prefix) == [[[1, 2, 3, VOCAB_SIZE]], [[4, VOCAB_SIZE]], []]
    assert IndexedDataset(str(prefix)).index.dtype == np.uint16
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out_text_document.bin", "out_text_document.idx"]


def test_a_pair_goes_where_links_lead_and_replaces_nothing_but_files(tmp_path: Path, capsys) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"text": "1 2 3"})
    flags = ["--input", source, "--output-prefix", str(tmp_path / "out")]
    names = ["out_text_document.bin", "out_text_document.idx"]
    (tmp_path / "disk").mkdir()
    for name in names:
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    for _ in range(2):
        assert run(*flags) == 0
        assert sorted(os.listdir(tmp_path / "disk")) == names
        assert documents(tmp_path / "out_text_document") == [[[1, 2, 3]]]
    capsys.readouterr()
    index = tmp_path / "disk" / names[1]
    index.unlink()
    os.mkfifo(index)
    assert run(*flags) == 2
    assert f"{index} is not a regular file" in capsys.readouterr().err
    assert index.is_fifo()


def test_end_of_document_is_added_only_on_demand(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"text": "1 2"})
    assert run("--input", source, "--output-prefix", str(tmp_path / "out")) == 0
    assert documents(tmp_path / "out_text_document") == [[[1, 2]]]


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"text": "70000"})
    flags = ["--input", source, "--output-prefix", str(tmp_path / "out"), *NUMBERS[:2], "--vocab-size", "100000"]
    assert preprocess_data.main(flags) == 0
    assert documents(tmp_path / "out_text_document") == [[[70000]]]
    assert (tmp_path / "out_text_document.bin").stat().st_size == 4


def test_each_key_has_its_own_files_and_a_list_of_texts_is_one_document(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"a": "1", "b": ["2 3", "", "4"]}, {"a": "5", "b": "6"})
    flags = ["--json-keys", "a", "b", "--append-eod"]
    assert run("--input", source, "--output-prefix", str(tmp_path / "new" / "out"), *flags) == 0
    assert documents(tmp_path / "new" / "out_a_document") == [[[1, VOCAB_SIZE]], [[5, VOCAB_SIZE]]]
    assert documents(tmp_path / "new" / "out_b_document") == [[[2, 3], [4, VOCAB_SIZE]], [[6, VOCAB_SIZE]]]


def test_inputs_are_read_in_order_patterns_sorted_and_gz_unpacked(tmp_path: Path) -> None:
    for number in (3, 2):
        write_lines(tmp_path / f"part-{number}.jsonl", {"text": str(number)})
    with gzip.open(tmp_path / "first.jsonl.gz", "wt") as stream:
        stream.write('{"text": "1"}\n')
    inputs = [str(tmp_path / "first.jsonl.gz"), str(tmp_path / "part-*.jsonl")]
    assert run("--input", *inputs, "--output-prefix", str(tmp_path / "out")) == 0
    assert documents(tmp_path / "out_text_document") == [[[1]], [[2]], [[3]]]


def test_the_number_of_workers_does_not_change_a_byte(tmp_path: Path) -> None:
    lines = [{"text": " ".join(str(line * 7 % 500) for _ in range(line % 30 + 1))} for line in range(300)]
    source = write_lines(tmp_path / "in.jsonl", *lines)
    for workers in ("1", "3"):
        prefix = str(tmp_path / f"out{workers}")
        assert run("--input", source, "--output-prefix", prefix, "--workers", workers, "--append-eod") == 0
    for suffix in (".bin", ".idx"):
        one, three = (tmp_path / f"out{workers}_text_document{suffix}" for workers in (1, 3))
        assert one.read_bytes() == three.read_bytes()


BAD_LINES = [
    (b'{"text": 1 2}', "line 2: not JSON: Expecting ',' delimiter at character 12"),
    (b'{"text": "1"', "line 2: not JSON"),
    (b'{"text": "\xff"}', "line 2: not JSON"),
    (["1"], "line 2: not a JSON object but list"),
    ({"body": "1"}, "line 2: no key 'text' (--json-keys); it has 'body'"),
    ({}, "line 2: no key 'text' (--json-keys); it has none"),
    ({"text": 7}, "line 2: the value of 'text' is neither text nor a list of texts"),
    ({"text": "1 word"}, "line 2: key 'text' cannot be tokenised"),
    ({"text": "1 501"}, "line 2: token id 501 is outside the vocabulary 0..500"),
    ({"text": "-1"}, "line 2: token id -1 is outside the vocabulary"),
    ({"text": "9" * 30}, "is outside the vocabulary"),
]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_and_what_was_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: object, message: str, workers: str
) -> None:
    good = write_lines(tmp_path / "good.jsonl", {"text": "7"})
    assert run("--input", good, "--output-prefix", str(tmp_path / "out")) == 0
    before = sorted(os.listdir(tmp_path))
    capsys.readouterr()
    source = write_lines(tmp_path / "bad.jsonl", {"text": "1"}, line)
    assert run("--input", source, "--output-prefix", str(tmp_path / "out"), "--workers", workers) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--input {source}" in error
    assert message in error
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "bad.jsonl"])
    assert documents(tmp_path / "out_text_document") == [[[7]]]


def test_bad_flags_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"text": "1"})
    empty = write_lines(tmp_path / "empty.jsonl", {"text": ""})
    out = str(tmp_path / "out")
    hugging_face = ["--tokenizer-type", "HuggingFaceTokenizer"]
    for flags, message in [
        (["--input", "nowhere-*.jsonl", "--output-prefix", out, *NUMBERS], "--input nowhere-*.jsonl: no such file"),
        (["--input", empty, "--output-prefix", out, *NUMBERS], "no tokens in 1 documents"),
        (["--input", source, "--output-prefix", source + "/out", *NUMBERS], "in.jsonl"),
        (["--input", source, "--output-prefix", out, "--tokenizer-type", "NullTokenizer"], "--vocab-size"),
        (["--input", source, "--output-prefix", out, *hugging_face], "--tokenizer-model"),
        (["--input", source, "--output-prefix", out, *hugging_face, "--tokenizer-model", source], "not a readable"),
        (["--input", source, "--output-prefix", out, *hugging_face, "--tokenizer-model", "gone"], "no such file"),
    ]:
        assert preprocess_data.main(flags) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error
    assert sorted(os.listdir(tmp_path)) == ["empty.jsonl", "in.jsonl"]


def test_zero_workers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("--input", "x", "--output-prefix", "y", "--workers", "0")
    assert stopped.value.code == 2
    assert "--workers must be at least 1 (got 0)" in capsys.readouterr().err


def test_ctrl_c_ends_the_run_without_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(preprocess_data.ProgressDisplay, "__call__", lambda self, progress: interrupt(progress))
    source = write_lines(tmp_path / "in.jsonl", *[{"text": "1"}] * 100)
    assert run("--input", source, "--output-prefix", str(tmp_path / "out"), "--workers", "2") == 130
    assert "interrupted" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.exhaustive
def test_a_log_file_gets_a_line_an_interval_and_a_summary(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[{"text": "1 2"}] * 100)
    command = [sys.executable, str(TOOL), "--input", source, "--output-prefix", str(tmp_path / "out"), *NUMBERS]
    result = subprocess.run([*command, "--log-interval", "40"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    lines = result.stderr.splitlines()
    assert [line.split()[:3] for line in lines] == [["Processed", "40", "documents"], ["Processed", "80", "documents"]]
    assert result.stdout.startswith("100 documents (")
    assert result.stdout.endswith(f", 200 tokens -> {tmp_path}/out_text_document\n")
