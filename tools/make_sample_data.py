#!/usr/bin/env python3
"""Make the sample that `make pretrain` trains on: the source and documentation of this Python's standard library.

Real text that every machine has, so nothing is downloaded. Writes into --output-dir (default .cache/sample):

    stdlib.jsonl                          the documents
    tokenizer.json                        a byte-level BPE tokenizer trained on them
    stdlib_text_document.bin, .idx        the tokens: --data-path .cache/sample/stdlib_text_document
    manifest.json                         what they were made from

A second call finds the manifest and returns at once. The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.zero_bubble.training.sample_data import make_sample

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / ".cache" / "sample"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument(
        "--max-bytes", type=int, default=10_000_000, help="size of the text in bytes (default 10000000)"
    )
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of tokens of the tokenizer (default 4096)")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="processes that tokenise")
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
