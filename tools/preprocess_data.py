#!/usr/bin/env python3
"""Tokenise JSON lines into the .bin/.idx files that megatron-core's datasets read.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod --workers 8

writes data/corpus_text_document.bin and .idx; train with `--data-path data/corpus_text_document`. The flags are
those of Megatron's tool of the same name. A mistake ends with one line and exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from megatron.zero_bubble.trainer.preprocessing import EncodingProgress


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
    runtime.add_argument("--workers", type=int, default=1, help="processes that tokenise (default 1)")
    runtime.add_argument("--log-interval", type=int, default=1000, help="documents between lines of progress")
    arguments = parser.parse_args(argv)
    for name in ("workers", "log_interval"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(arguments, name)})")
    return arguments


class ProgressDisplay:
    """Shows progress: a bar on a terminal, elsewhere (a log file) a line every `log_interval` documents."""

    def __init__(self, total_bytes: int | None, log_interval: int) -> None:
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        self._log_interval = log_interval
        self._next_line = log_interval
        self._start = time.perf_counter()
        self.last: EncodingProgress | None = None

    def __call__(self, progress: EncodingProgress) -> None:
        self.last = progress
        self._bar.update(progress.input_bytes - self._bar.n)
        self._bar.set_postfix(documents=progress.documents, refresh=False)
        if self._bar.disable and progress.documents >= self._next_line:
            self._next_line = (progress.documents // self._log_interval + 1) * self._log_interval
            print(f"Processed {self._rates(progress)}", file=sys.stderr, flush=True)

    def summary(self, prefixes: list[str]) -> str:
        self._bar.close()
        assert self.last is not None
        return f"{self._rates(self.last)}, {self.last.tokens} tokens -> {' '.join(prefixes)}"

    def close(self) -> None:
        self._bar.close()

    def _rates(self, progress: EncodingProgress) -> str:
        elapsed = time.perf_counter() - self._start
        per_second = progress.documents / elapsed, progress.input_bytes / elapsed / 2**20
        return f"{progress.documents} documents ({per_second[0]:.1f} docs/s, {per_second[1]:.2f} MB/s)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit status: 0, 2 for a user's mistake, 1 for a killed worker, 130 for Ctrl-C."""
    arguments = parse_arguments(argv)
    with warnings.catch_warnings():
        # Imported here so that --help does not wait for it; megatron-core warns about missing GPU extensions then.
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        from megatron.zero_bubble.trainer.preprocessing import EncodeSpec, expand_inputs, preprocess
    try:
        files = expand_inputs(arguments.input)
        compressed = any(file.endswith(".gz") for file in files)  # the uncompressed size of a .gz file is not known
        total_bytes = None if compressed else sum(map(os.path.getsize, files))
        display = ProgressDisplay(total_bytes, arguments.log_interval)
        spec = EncodeSpec(
            arguments.tokenizer_type,
            arguments.tokenizer_model,
            arguments.vocab_size,
            arguments.vocab_file,
            arguments.merge_file,
            tuple(arguments.json_keys),
            arguments.append_eod,
        )
        try:
            prefixes = preprocess(files, arguments.output_prefix, spec, arguments.workers, display)
            print(display.summary(prefixes))
        finally:
            display.close()
    except (ValueError, OSError) as error:
        print(f"preprocess_data.py: error: {error}", file=sys.stderr)
        return 2
    except BrokenProcessPool:
        print("preprocess_data.py: error: a worker was killed (out of memory?); try fewer --workers", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("preprocess_data.py: interrupted, nothing written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
