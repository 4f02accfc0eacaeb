"""Tokenises JSON lines to .bin/.idx files: the functions behind tools/preprocess_data.py.

Documents are encoded by a pool of processes and written in the order of the input, so the result does not depend on
the number of workers. The files get their final names only when both are complete.
"""

from __future__ import annotations

import functools
import glob
import gzip
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

from megatron.zero_bubble.trainer.tokenizer import build_tokenizer

LINES_PER_TASK = 32
TASKS_IN_FLIGHT = 4  # for each worker; bounds the memory of encoded documents that are not written yet


@dataclass(frozen=True)
class EncodeSpec:
    """Settings with which a worker encodes documents; small, because every task carries a copy."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False


@dataclass(frozen=True)
class Line:
    """One line of an input file as bytes, with its number."""

    file: str
    number: int
    data: bytes


@dataclass(frozen=True)
class Document:
    """The tokens of one JSON value."""

    tokens: np.ndarray
    lengths: list[int]
    """Tokens of each sequence; a list of strings gives several sequences. The sum is len(tokens)."""


Encoded = tuple[list[list[Document]], int]
"""The documents of some lines, a list for each line with one document for each key, and the bytes of the lines."""


@dataclass(frozen=True)
class EncodingProgress:
    """Numbers of lines, bytes and tokens that are encoded and written."""

    documents: int
    input_bytes: int
    """Bytes of the uncompressed lines."""
    tokens: int


class Encoder:
    """Encodes lines as token arrays; raises `ValueError` that names file and line for a line that cannot be."""

    def __init__(self, spec: EncodeSpec) -> None:
        self.spec = spec
        self.tokenizer = build_tokenizer(
            spec.tokenizer_type, spec.tokenizer_model, spec.vocab_size, spec.vocab_file, spec.merge_file
        )
        self.dtype = np.dtype(DType.optimal_dtype(self.tokenizer.vocab_size))

    def encode(self, line: Line) -> list[Document]:
        """Encode a line as one document for each of `json_keys`."""
        where = f"--input {line.file}, line {line.number}"
        try:
            record = json.loads(line.data)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error.msg} at character {error.pos + 1}") from None
        except ValueError as error:  # not UTF-8
            raise ValueError(f"{where}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: not a JSON object but {type(record).__name__}")
        return [self._encode_key(record, key, where) for key in self.spec.json_keys]

    def encode_all(self, lines: list[Line]) -> Encoded:
        return [self.encode(line) for line in lines], sum(len(line.data) for line in lines)

    def _encode_key(self, record: dict[str, object], key: str, where: str) -> Document:
        if key not in record:
            raise ValueError(f"{where}: no key {key!r} (--json-keys); it has {', '.join(map(repr, record)) or 'none'}")
        value = record[key]
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: the value of {key!r} is neither text nor a list of texts")
        try:
            sequences = [self.tokenizer.tokenize(text) for text in texts if text]
        except ValueError as error:  # NullTokenizer: not a number; a lone surrogate: not encodable
            raise ValueError(f"{where}: key {key!r} cannot be tokenised: {error}") from None
        sequences = [sequence for sequence in sequences if sequence]
        if sequences and self.spec.append_eod:
            sequences[-1].append(self.tokenizer.eod)
        ids = list(chain.from_iterable(sequences))
        outside = [token for token in (min(ids), max(ids)) if not 0 <= token < self.tokenizer.vocab_size] if ids else []
        if outside:
            raise ValueError(
                f"{where}: token id {outside[0]} is outside the vocabulary 0..{self.tokenizer.vocab_size - 1}"
            )
        return Document(np.array(ids, dtype=self.dtype), [len(sequence) for sequence in sequences])


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    spec: EncodeSpec,
    workers: int,
    report: Callable[[EncodingProgress], None],
) -> list[str]:
    """Tokenise JSON-lines files (plain or .gz; glob patterns) and write OUTPUT_PREFIX_KEY_document.bin and .idx.

    Args:
        workers: number of processes that encode; 1 encodes in this process.
        report: called after every task of up to LINES_PER_TASK documents.

    Returns the prefixes of the written pairs, one for each of `spec.json_keys`.
    Raises ValueError for a user's mistake, OSError if a file cannot be read or written, and BrokenProcessPool if a
    worker is killed. Files that exist under the final names are then left as they were.
    """
    files = expand_inputs(inputs)
    encoder = Encoder(spec)  # a bad tokenizer shows here, before any process starts
    prefixes = [f"{output_prefix}_{key}_document" for key in spec.json_keys]
    os.makedirs(os.path.dirname(output_prefix) or ".", exist_ok=True)
    with ExitStack() as stack:
        writers = [stack.enter_context(PairWriter(prefix, encoder.dtype)) for prefix in prefixes]
        documents = input_bytes = tokens = 0
        for encoded, read_bytes in _encoded_tasks(encoder, read_lines(files), workers):
            for by_key in encoded:
                for writer, document in zip(writers, by_key, strict=True):
                    writer.add(document)
                    tokens += len(document.tokens)
            documents += len(encoded)
            input_bytes += read_bytes
            report(EncodingProgress(documents, input_bytes, tokens))
        if tokens == 0:
            raise ValueError(f"--input {' '.join(inputs)}: no tokens in {documents} documents")
        for writer in writers:
            writer.publish()
    return prefixes


def expand_inputs(inputs: Sequence[str]) -> list[str]:
    """The files that paths and glob patterns name, sorted within a pattern. `ValueError` if one names no file."""
    files = []
    for pattern in inputs:
        matches = [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(pattern)))
        if not matches:
            raise ValueError(f"--input {pattern}: no such file")
        files += matches
    return files


def read_lines(files: Iterable[str]) -> Iterator[Line]:
    """Iterate over the lines of plain or gzipped files, except blank ones."""
    for file in files:
        opener = gzip.open if file.endswith(".gz") else open
        with opener(file, "rb") as stream:
            for number, data in enumerate(stream, start=1):
                if not data.isspace():
                    yield Line(file, number, data)


class PairWriter:
    """Writes PREFIX.bin and PREFIX.idx under temporary names in the same folder, until `publish` renames them."""

    def __init__(self, prefix: str, dtype: np.dtype) -> None:
        # Links are resolved, so that the pair is written to the disk to which a link leads.
        self._final = [os.path.realpath(path) for path in (get_bin_path(prefix), get_idx_path(prefix))]
        for path in self._final:
            if os.path.exists(path) and not os.path.isfile(path):
                raise ValueError(f"--output-prefix: {path} is not a regular file, which a data set needs")
        self._partial = [f"{path}.partial-{os.getpid()}" for path in self._final]
        self._builder = IndexedDatasetBuilder(self._partial[0], dtype=dtype.type)

    def __enter__(self) -> PairWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._builder.data_file.close()
        for path in self._partial:
            if os.path.exists(path):
                os.remove(path)

    def add(self, document: Document) -> None:
        self._builder.add_document(document.tokens, document.lengths)

    def publish(self) -> None:
        """Give both files their final names. An old index is removed first, so that an index always fits its .bin."""
        self._builder.finalize(self._partial[1])
        final_bin, final_idx = self._final
        if os.path.exists(final_idx):
            os.remove(final_idx)
        os.replace(self._partial[0], final_bin)
        os.replace(self._partial[1], final_idx)


def _encoded_tasks(encoder: Encoder, lines: Iterator[Line], workers: int) -> Iterator[Encoded]:
    """Encode tasks in the order of the lines, with a bounded number of tasks under way.

    Uses an executor, because a multiprocessing.Pool waits for ever for a worker that the system has killed.
    """
    tasks = iter(lambda: list(islice(lines, LINES_PER_TASK)), [])
    if workers == 1:
        yield from map(encoder.encode_all, tasks)
        return
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(encoder.spec,)) as executor:
        under_way: deque[Future[Encoded]] = deque()
        try:
            for task in tasks:
                under_way.append(executor.submit(_encode_task, encoder.spec, task))
                if len(under_way) >= workers * TASKS_IN_FLIGHT:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _start_worker(spec: EncodeSpec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C for all
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes run in parallel already
    _worker_encoder(spec)


@functools.lru_cache(maxsize=1)
def _worker_encoder(spec: EncodeSpec) -> Encoder:
    """The encoder of a worker, kept because loading a tokenizer takes longer than encoding a task."""
    return Encoder(spec)


def _encode_task(spec: EncodeSpec, lines: list[Line]) -> Encoded:
    return _worker_encoder(spec).encode_all(lines)
