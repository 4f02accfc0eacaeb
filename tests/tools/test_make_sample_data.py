"""tools/make_sample_data.py: a complete sample or none, the same on every call."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.zero_bubble.trainer.tokenizer import LocalTokenizer, load_tokenizer
from tools import make_sample_data
from tools.make_sample_data import main

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_sample_data.py"
MAX_BYTES = 1_100_000
FILES = ["manifest.json", "stdlib.jsonl", "stdlib_text_document.bin", "stdlib_text_document.idx", "tokenizer.json"]


def make(folder: Path, *flags: str) -> int:
    sizes = ["--max-bytes", str(MAX_BYTES), "--vocab-size", "512", "--workers", "1"]
    return main(["--output-dir", str(folder), *sizes, *flags])


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "sample"
    assert make(folder) == 0
    return folder


def tokenizer_of(folder: Path) -> LocalTokenizer:
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder), "vocab_size": None}
    return load_tokenizer(Namespace(**flags))


def test_the_sample_is_complete(sample: Path) -> None:
    assert sorted(content(sample)) == FILES
    records = [json.loads(line) for line in (sample / "stdlib.jsonl").read_text().splitlines()]
    assert 0.9 * MAX_BYTES < sum(len(record["text"].encode()) for record in records) <= MAX_BYTES
    tokenizer = tokenizer_of(sample)
    assert tokenizer.vocab_size == 512
    data = IndexedDataset(str(sample / "stdlib_text_document"))
    assert len(data) == len(records)
    for document in (0, len(records) - 1):
        tokens = data[document].tolist()
        assert tokens[-1] == tokenizer.eod
        assert tokenizer.detokenize(tokens[:-1]) == records[document]["text"]


def test_the_sample_is_the_library_without_tests_and_other_peoples_packages(tmp_path: Path) -> None:
    for name in ("os.py", "json/decoder.py", "test/test_os.py", "json/tests/a.py", "site-packages/x.py", "a.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_text("\n")
    found = dict(make_sample_data.documents(tmp_path, 10**9))
    modules = {name for name in found if not name.startswith("pydoc/")}
    assert modules == {"os.py", "json/decoder.py"}
    assert "while" in found.get("pydoc/while", "while")  # pydoc's topics, where the Python has them


def test_the_same_python_makes_the_same_sample(sample: Path, tmp_path: Path) -> None:
    assert make(tmp_path / "again") == 0
    assert content(tmp_path / "again") == content(sample)


def test_a_second_call_finds_the_sample_without_loading_torch(sample: Path) -> None:
    times = {file: file.stat().st_mtime_ns for file in sample.iterdir()}
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['x', '--output-dir', {str(sample)!r}, '--max-bytes', '{MAX_BYTES}', '--vocab-size', '512']\n"
        "try:\n"
        f"    runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0, stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"sample found in {sample}\n"
    assert {file: file.stat().st_mtime_ns for file in sample.iterdir()} == times


def test_other_flags_make_another_sample_in_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "sample"
    assert make(folder) == 0
    assert make(folder, "--vocab-size", "300") == 0
    assert tokenizer_of(folder).vocab_size == 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sample", "sample.lock"]


# Each step writes to the same folder, which the next call finds and removes.
@pytest.mark.parametrize(
    "step",
    [
        *(pytest.param(step, marks=pytest.mark.exhaustive) for step in ("write_documents", "train_tokenizer")),
        "tokenise",
    ],
)
def test_an_interrupted_call_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: Path, step: str
) -> None:
    folder = tmp_path / "sample"
    whole_step = getattr(make_sample_data, step)

    def die_after_the_step(*args: object) -> None:
        whole_step(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(make_sample_data, step, die_after_the_step)
        assert make(folder) == 130
    assert not folder.exists()
    assert make(folder) == 0
    assert content(folder) == content(sample)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sample", "sample.lock"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    assert make(tmp_path / "home") == 2
    assert "holds something that this tool did not make" in capsys.readouterr().err
    assert content(tmp_path / "home") == {"thesis.tex": b"years of work"}


def test_a_python_without_sources_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_sample_data.sysconfig, "get_path", lambda name: str(tmp_path))
    assert make(tmp_path / "sample") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "comes without the sources of its library" in error
    assert not (tmp_path / "sample").exists()


def test_a_vocabulary_without_room_for_the_bytes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--vocab-size", "256"])
    assert stopped.value.code == 2
    assert "--vocab-size must be at least 257" in capsys.readouterr().err
