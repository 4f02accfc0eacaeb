#!/usr/bin/env python3
"""Make the sample data for `make pretrain`: the source and documentation of the standard library of this Python.

The sample is real text that every machine has, so that nothing is downloaded. The tool writes into --output-dir
(default .cache/sample):

    stdlib.jsonl                          the documents
    tokenizer.json                        a byte-level BPE tokenizer trained on the documents
    stdlib_text_document.bin, .idx        the tokens: --data-path .cache/sample/stdlib_text_document
    manifest.json                         the sources of the other files

A second call finds the manifest and returns at once. The folder gets its name only when the folder is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import os
import runpy
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / ".cache" / "sample"
END_OF_DOCUMENT = "<|endoftext|>"
FORMAT = 1  # increase this when the same Python and flags give other files than before
MIN_BYTES = 1_000_000

# Installed packages, tests and tables of character sets: neither prose nor programs, or not on all machines.
SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}


def documents(library: Path, max_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the library's modules and pydoc's topics, at most `max_bytes` of UTF-8 in total.

    The documents are ordered by a hash of the name, so that the order is the same on every machine and every part of
    the data is a mixture (the end becomes the validation set).
    """
    sources: dict[str, Path | str] = dict(_topics())
    for path in library.rglob("*.py"):
        relative = path.relative_to(library)
        if not SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            sources[relative.as_posix()] = path
    for name in sorted(sources, key=lambda name: hashlib.sha256(name.encode()).digest()):
        source = sources[name]
        try:
            text = source if isinstance(source, str) else source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a few modules are written in another encoding
        size = len(text.encode())
        if text.strip() and size <= max_bytes:
            max_bytes -= size
            yield name, text


def _topics() -> dict[str, str]:
    """Name -> text of pydoc about the language; empty if the Python distribution lacks these texts."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return {f"pydoc/{name}": text for name, text in topics.items()}


def write_documents(library: Path, max_bytes: int, file: Path) -> None:
    """Write the documents to `file`, each as a line with a JSON object that has the name and the text.

    Raises `ValueError` if the library has too little source.
    """
    total = 0
    with file.open("w", encoding="utf-8") as stream, _bar("reading", max_bytes) as bar:
        for name, text in documents(library, max_bytes):
            stream.write(json.dumps({"name": name, "text": text}) + "\n")
            total += len(text.encode())
            bar.update(total - bar.n)
    if total < MIN_BYTES:
        raise ValueError(
            f"only {total} bytes of source in {library}, at least {MIN_BYTES} are needed; "
            "this Python comes without the sources of its library"
        )


def train_tokenizer(file: Path, vocab_size: int, output: Path) -> None:
    """Train a byte-level BPE tokenizer with exactly `vocab_size` tokens, including the end-of-document token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    with file.open(encoding="utf-8") as stream:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in stream), trainer)
    tokenizer.save(str(output))


def tokenise(folder: Path, workers: int) -> None:
    """Tokenise the documents in `folder` to a .bin/.idx pair with tools/preprocess_data.py.

    Raises `ValueError` if the tokenisation fails.
    """
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer.json")]
    files = ["--input", str(folder / "stdlib.jsonl"), "--output-prefix", str(folder / "stdlib"), "--append-eod"]
    tool = runpy.run_path(str(Path(__file__).with_name("preprocess_data.py")))
    with contextlib.redirect_stdout(io.StringIO()):
        status = tool["main"]([*files, *tokenizer, "--workers", str(workers)])
    if status:
        raise ValueError(f"preprocess_data.py ended with status {status}")


def make_sample(output: Path, max_bytes: int, vocab_size: int, workers: int) -> bool:
    """Make the folder `output`, unless the folder already has the same sample. Returns whether the folder was made.

    A second call at the same time waits for the first call, and then finds the complete sample. Raises `ValueError` if
    `output` has other contents, or if this Python has no sources.
    """
    wanted = {"format": FORMAT, "python": sys.version, "max_bytes": max_bytes, "vocab_size": vocab_size}
    if _manifest(output) == wanted:
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    with _lock(_beside(output, "lock")):
        manifest = _manifest(output)
        if manifest == wanted:
            return False
        if manifest is None and output.exists() and any(output.iterdir()):
            raise ValueError(f"--output-dir {output}: the folder holds something that this tool did not make")
        partial, old = _beside(output, "partial"), _beside(output, "old")
        for leftover in (partial, old):  # left by a killed call
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        with _step("1/3: reading the standard library"):
            write_documents(Path(sysconfig.get_path("stdlib")), max_bytes, partial / "stdlib.jsonl")
        with _step(f"2/3: training a tokenizer of {vocab_size} tokens"):
            train_tokenizer(partial / "stdlib.jsonl", vocab_size, partial / "tokenizer.json")
        with _step("3/3: tokenising"):
            tokenise(partial, workers)
        (partial / "manifest.json").write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        if output.exists():
            output.rename(old)
        partial.rename(output)
        shutil.rmtree(old, ignore_errors=True)
    return True


def _manifest(folder: Path) -> dict[str, object] | None:
    try:
        return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """A lock on `file` that only one process can have at a time; the system releases the lock when the process dies."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    print(f"sample {what} ...", flush=True)
    start = time.perf_counter()
    yield
    print(f"sample {what}: {time.perf_counter() - start:.1f} s", flush=True)


def _bar(what: str, total: int) -> tqdm:
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument(
        "--max-bytes", type=int, default=10_000_000, help="size of the text in bytes (default 10000000)"
    )
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of tokens of the tokenizer (default 4096)")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="threads that tokenise")
    arguments = parser.parse_args(argv)
    if arguments.vocab_size < 257 or arguments.workers < 1:
        parser.error("--vocab-size must be at least 257 (256 bytes and end of document), --workers at least 1")
    try:
        made = make_sample(arguments.output_dir, arguments.max_bytes, arguments.vocab_size, arguments.workers)
    except (ValueError, OSError) as error:
        print(f"make_sample_data.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("make_sample_data.py: interrupted, no sample made", file=sys.stderr)
        return 130
    print(f"sample {'made' if made else 'found'} in {arguments.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
