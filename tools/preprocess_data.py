#!/usr/bin/env python3
"""Tokenise JSON lines into the .bin/.idx files that megatron-core's datasets read.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod --workers 8

writes data/corpus_text_document.bin and .idx; train with `--data-path data/corpus_text_document`. The flags have the
names of the flags of Megatron's tool of the same name. A user's mistake ends the command with a one-line message and
exit status 2. The .bin and the .idx file get their final names only when both files are complete.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

if TYPE_CHECKING:
    from megatron.zero_bubble.trainer.tokenizer import LocalTokenizer

LINES_PER_BATCH = 256


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_argument_group("input and output")
    data.add_argument("--input", nargs="+", required=True, help="JSON-lines files (or .gz), or glob patterns")
    data.add_argument("--json-keys", nargs="+", default=["text"], help="keys to take text from, one output for each")
    data.add_argument("--output-prefix", required=True, help="writes OUTPUT_PREFIX_KEY_document.bin and .idx")
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument(
        "--tokenizer-type", required=True, choices=("HuggingFaceTokenizer", "GPT2BPETokenizer", "NullTokenizer")
    )
    tokenizer.add_argument(
        "--tokenizer-model", help="HuggingFaceTokenizer: tokenizer.json, or the folder that holds it"
    )
    tokenizer.add_argument("--vocab-file", help="GPT2BPETokenizer: vocab.json")
    tokenizer.add_argument("--merge-file", help="GPT2BPETokenizer: merges.txt")
    tokenizer.add_argument("--vocab-size", type=int, help="NullTokenizer: number of token ids before end of document")
    tokenizer.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument("--workers", type=int, default=1, help="threads that tokenise (default 1)")
    runtime.add_argument("--log-interval", type=int, default=1000, help="documents between lines of progress")
    arguments = parser.parse_args(argv)
    for name in ("workers", "log_interval"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(arguments, name)})")
    return arguments


class EncodingProgress(NamedTuple):
    """Number of documents, bytes of their uncompressed lines, and number of written tokens."""

    documents: int = 0
    input_bytes: int = 0
    tokens: int = 0


class ProgressDisplay:
    """Shows progress: as a bar on a terminal, otherwise as a line for every `log_interval` documents."""

    def __init__(self, total_bytes: int | None, log_interval: int) -> None:
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        self._log_interval = log_interval
        self._next_line = log_interval
        self._start = time.perf_counter()
        self.last = EncodingProgress()

    def __call__(self, progress: EncodingProgress) -> None:
        self.last = progress
        self._bar.update(progress.input_bytes - self._bar.n)
        self._bar.set_postfix(documents=progress.documents, refresh=False)
        if self._bar.disable and progress.documents >= self._next_line:
            self._next_line = (progress.documents // self._log_interval + 1) * self._log_interval
            print(f"Processed {self._rates(progress)}", file=sys.stderr, flush=True)

    def summary(self, prefixes: list[str]) -> str:
        self._bar.close()
        return f"{self._rates(self.last)}, {self.last.tokens} tokens -> {' '.join(prefixes)}"

    def close(self) -> None:
        self._bar.close()

    def _rates(self, progress: EncodingProgress) -> str:
        elapsed = time.perf_counter() - self._start
        per_second = progress.documents / elapsed, progress.input_bytes / elapsed / 2**20
        return f"{progress.documents} documents ({per_second[0]:.1f} docs/s, {per_second[1]:.2f} MB/s)"


class Line(NamedTuple):
    """A line of an input file as bytes, with the name of the file and the number of the line."""

    place: str
    data: bytes

    def texts(self, key: str) -> list[str]:
        """Return the text, or the texts, under a key of the JSON object in the line.

        Raises:
            ValueError: the line is not a JSON object, or has no text under the key.
        """
        try:
            record: Any = json.loads(self.data)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.place}: not JSON: {error.msg} at character {error.pos + 1}") from None
        except ValueError as error:  # not UTF-8
            raise ValueError(f"{self.place}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{self.place}: not a JSON object but {type(record).__name__}")
        if key not in record:
            keys = ", ".join(map(repr, record)) or "none"
            raise ValueError(f"{self.place}: no key {key!r} (--json-keys); it has {keys}")
        texts = record[key] if isinstance(record[key], list) else [record[key]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{self.place}: the value of {key!r} is neither text nor a list of texts")
        return [text for text in texts if text]


def encode(lines: Sequence[Line], key: str, tokenizer: LocalTokenizer, *, append_eod: bool) -> list[list[list[int]]]:
    """Return the token ids of every text under `key` of every line, without texts that have no tokens.

    Raises:
        ValueError: a line cannot be encoded; the message names the first such line.
    """
    texts = [line.texts(key) for line in lines]
    try:
        encoded = iter(tokenizer.tokenize_all([text for of_line in texts for text in of_line]))
        documents = [[ids for ids in islice(encoded, len(of_line)) if ids] for of_line in texts]
    except ValueError as error:  # NullTokenizer: not a number; a lone surrogate: not encodable
        if len(lines) == 1:
            raise ValueError(f"{lines[0].place}: key {key!r} cannot be tokenised: {error}") from None
        return [document for line in lines for document in encode([line], key, tokenizer, append_eod=append_eod)]
    for line, document in zip(lines, documents, strict=True):
        outside = [token for ids in document for token in (min(ids), max(ids)) if not 0 <= token < tokenizer.vocab_size]
        if outside:
            vocabulary = f"0..{tokenizer.vocab_size - 1}"
            raise ValueError(f"{line.place}: token id {outside[0]} is outside the vocabulary {vocabulary}")
        if document and append_eod:
            document[-1].append(tokenizer.eod)
    return documents


def load_tokenizer(arguments: argparse.Namespace) -> LocalTokenizer:
    """The tokenizer that the flags name, which encodes in `--workers` threads.

    Raises:
        ValueError: the tokenizer cannot be used.
    """
    # The tokenizers library reads both variables when it first encodes a text.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if arguments.workers > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)
    # Imported here so that --help does not wait for it; megatron-core warns about missing GPU extensions then.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    from megatron.zero_bubble.trainer import tokenizer

    return tokenizer.load_tokenizer(arguments)


def preprocess(
    arguments: argparse.Namespace,
    files: Sequence[str],
    tokenizer: LocalTokenizer,
    report: Callable[[EncodingProgress], None],
) -> list[str]:
    """Tokenise files of JSON lines and write OUTPUT_PREFIX_KEY_document.bin and .idx.

    Args:
        report: function that is called after every batch of lines.

    Returns:
        The prefixes of the .bin/.idx pairs, one for each key.

    Raises:
        ValueError: a line or an output path cannot be used; earlier output files stay unchanged.
        OSError: a file cannot be read or written.
    """
    from megatron.core.datasets.indexed_dataset import DType

    dtype = np.dtype(DType.optimal_dtype(tokenizer.vocab_size))
    prefixes = [f"{arguments.output_prefix}_{key}_document" for key in arguments.json_keys]
    os.makedirs(os.path.dirname(arguments.output_prefix) or ".", exist_ok=True)
    lines, progress = read_lines(files), EncodingProgress()
    with ExitStack() as stack:
        writers = [stack.enter_context(PairWriter(prefix, dtype)) for prefix in prefixes]
        while batch := list(islice(lines, min(LINES_PER_BATCH, arguments.log_interval))):
            tokens = 0
            for key, writer in zip(arguments.json_keys, writers, strict=True):
                for document in encode(batch, key, tokenizer, append_eod=arguments.append_eod):
                    tokens += writer.add(document)
            progress = EncodingProgress(
                progress.documents + len(batch),
                progress.input_bytes + sum(len(line.data) for line in batch),
                progress.tokens + tokens,
            )
            report(progress)
        if progress.tokens == 0:
            raise ValueError(f"--input {' '.join(arguments.input)}: no tokens in {progress.documents} documents")
        for writer in writers:
            writer.publish()
    return prefixes


def expand_inputs(inputs: Sequence[str]) -> list[str]:
    """The files that paths and glob patterns name, in the given order; the files of a pattern are sorted.

    Raises `ValueError` if a path or pattern names no file.
    """
    files = []
    for pattern in inputs:
        matches = [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(pattern)))
        if not matches:
            raise ValueError(f"--input {pattern}: no such file")
        files += matches
    return files


def read_lines(files: Iterable[str]) -> Iterator[Line]:
    """Yield the lines of plain or gzipped files, except blank lines."""
    for file in files:
        opener = gzip.open if file.endswith(".gz") else open
        with opener(file, "rb") as stream:
            for number, data in enumerate(stream, start=1):
                if not data.isspace():
                    yield Line(f"--input {file}, line {number}", data)


class PairWriter:
    """Writes PREFIX.bin and PREFIX.idx under temporary names in the same folder; `publish` renames the files."""

    def __init__(self, prefix: str, dtype: np.dtype) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

        # Links are resolved, so that the pair is written to the disk to which a link leads.
        self._final = [os.path.realpath(path) for path in (get_bin_path(prefix), get_idx_path(prefix))]
        for path in self._final:
            if os.path.exists(path) and not os.path.isfile(path):
                raise ValueError(f"--output-prefix: {path} is not a regular file, which a data set needs")
        self._partial = [f"{path}.partial-{os.getpid()}" for path in self._final]
        self._builder = IndexedDatasetBuilder(self._partial[0], dtype=dtype.type)
        self._dtype = dtype

    def __enter__(self) -> PairWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._builder.data_file.close()
        for path in self._partial:
            if os.path.exists(path):
                os.remove(path)

    def add(self, sequences: Sequence[Sequence[int]]) -> int:
        """Write a document, and return the number of its tokens."""
        tokens = np.array([token for sequence in sequences for token in sequence], dtype=self._dtype)
        self._builder.add_document(tokens, [len(sequence) for sequence in sequences])
        return len(tokens)

    def publish(self) -> None:
        """Give both files their final names.

        An old index is removed first, so that an index never belongs to another .bin file.
        """
        self._builder.finalize(self._partial[1])
        final_bin, final_idx = self._final
        if os.path.exists(final_idx):
            os.remove(final_idx)
        os.replace(self._partial[0], final_bin)
        os.replace(self._partial[1], final_idx)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit status: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    arguments = parse_arguments(argv)
    try:
        files, tokenizer = expand_inputs(arguments.input), load_tokenizer(arguments)
        compressed = any(file.endswith(".gz") for file in files)  # the uncompressed size of a .gz file is not known
        display = ProgressDisplay(None if compressed else sum(map(os.path.getsize, files)), arguments.log_interval)
        try:
            print(display.summary(preprocess(arguments, files, tokenizer, display)))
        finally:
            display.close()
    except (ValueError, OSError) as error:
        print(f"preprocess_data.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("preprocess_data.py: interrupted, nothing written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
