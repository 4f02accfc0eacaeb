"""Checks data flags and tokenized data (.bin/.idx pairs, blends and splits) early and without communication.

megatron-core detects mistakes in data late: by a traceback on one rank, by an endless loop (a split without documents),
or by an out-of-range index on the GPU (tokens of another tokenizer). All checks of this module raise `ValueError` with
one line that names the flag and the file.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType, get_bin_path, get_idx_path
from megatron.core.datasets.utils import get_blend_from_list

from megatron.zero_bubble.session.files import reading
from megatron.zero_bubble.trainer.arguments import Arguments, DataFlags

Blend = tuple[list[str], list[float] | None]
"""Prefixes of .bin/.idx pairs, and their weights; None stands for weights in proportion to the pairs' lengths."""

SPLITS = ("train", "valid", "test")

_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, number of document boundaries
_CHUNK = 1 << 20  # elements read at a time


def check_data(args: Arguments, vocab_size: int) -> None:
    """Check every data file without communication; `complete_and_check` must have checked the flags before.

    Args:
        vocab_size: size of the tokenizer's vocabulary; every token id in the files must be below this size.

    Raises:
        ValueError: a file or a flag is wrong; the message is one line.
    """
    if (args.valid_data_path or args.test_data_path) and not args.train_data_path:
        raise ValueError("--valid-data-path and --test-data-path need --train-data-path")
    if args.train_data_path and args.split != DataFlags.split:
        raise ValueError(f"--split {args.split} cuts --data-path; it has no effect with --train-data-path")
    split = args.split if args.data_path else None
    if split is not None:
        check_split(split)
    for flag, (prefixes, weights) in blends_of(args).items():
        # In a blend without weights, each dataset is read for one epoch, and must therefore contain a whole sample.
        holds_samples = weights is None and len(prefixes) > 1 and not args.variable_seq_lengths
        min_tokens = args.seq_length + 1 if holds_samples else 1
        for prefix in prefixes:
            file = open_token_file(prefix, flag)
            check_vocabulary(file, vocab_size, flag)
            check_split_sizes(file, split, min_tokens, flag)


def blends_of(args: Arguments) -> dict[str, Blend]:
    """Return the blend of datasets that each given data flag describes, in a dictionary with the flags as keys."""
    paths = {"--data-path": args.data_path}
    paths |= {f"--{name}-data-path": getattr(args, f"{name}_data_path") for name in SPLITS}
    return {flag: parse_blend(values, flag) for flag, values in paths.items() if values}


@dataclass(frozen=True)
class TokenFile:
    """A checked .bin/.idx pair."""

    prefix: str
    dtype: np.dtype
    lengths: np.ndarray
    """Number of tokens of each sequence, int32 [num_sequences], mapped from the .idx file."""

    def has_tokens(self, first: int, end: int, minimum: int) -> bool:
        """Whether sequences `first` to `end` - 1 hold at least `minimum` tokens; reading stops at `minimum` tokens."""
        parts = (self.lengths[start : min(start + _CHUNK, end)] for start in range(first, end, _CHUNK))
        totals = accumulate((int(part.sum(dtype=np.int64)) for part in parts), initial=0)
        return any(total >= minimum for total in totals)


def open_token_file(prefix: str, flag: str) -> TokenFile:
    """Open a .bin/.idx pair, and check that neither PREFIX.idx nor PREFIX.bin is truncated or damaged."""
    idx, bin_ = get_idx_path(prefix), get_bin_path(prefix)
    for path in (idx, bin_):
        if not os.path.isfile(path):
            hint = "; give the prefix without .bin or .idx" if prefix.endswith((".bin", ".idx")) else ""
            raise ValueError(f"{flag}: no such file: {path}{hint}")
    size = os.path.getsize(idx)
    with reading(f"{flag} {idx}"), open(idx, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(f"{flag}: {idx} is truncated: {size} bytes, less than its header")
    magic, version, code, num_sequences, num_boundaries = _HEADER.unpack(header)
    if magic != _INDEX_HEADER or version != 1 or code not in {member.value for member in DType}:
        raise ValueError(f"{flag}: {idx} is not an index file of Megatron (wrong magic, version or dtype)")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if size < expected:
        raise ValueError(f"{flag}: {idx} is truncated: {size} bytes, its header announces {expected}")
    if num_sequences == 0:
        raise ValueError(f"{flag}: {idx} holds no documents")
    dtype = np.dtype(DType.dtype_from_code(code))
    lengths = np.memmap(idx, np.int32, "r", _HEADER.size, (num_sequences,))
    offsets = np.memmap(idx, np.int64, "r", _HEADER.size + 4 * num_sequences, (num_sequences,))
    for start in range(0, num_sequences, _CHUNK):
        ends = offsets[start : start + _CHUNK] + lengths[start : start + _CHUNK] * np.int64(dtype.itemsize)
        following = offsets[start + 1 : start + _CHUNK + 1]
        wrong = np.flatnonzero((ends[: len(following)] != following) | (lengths[start : start + len(following)] < 0))
        if len(wrong):
            raise ValueError(
                f"{flag}: {idx} is damaged: sequence {start + wrong[0]} does not end where the next begins"
            )
    needed = int(offsets[-1]) + int(lengths[-1]) * dtype.itemsize
    if os.path.getsize(bin_) < needed:
        raise ValueError(f"{flag}: {bin_} is truncated: {os.path.getsize(bin_)} bytes, its index announces {needed}")
    return TokenFile(prefix, dtype, lengths)


def check_vocabulary(file: TokenFile, vocab_size: int, flag: str) -> None:
    """Refuse a file if any of its first 1,048,576 tokens is outside the vocabulary."""
    path = get_bin_path(file.prefix)
    with reading(f"{flag} {path}"):
        tokens = np.fromfile(path, file.dtype, _CHUNK)
    wrong = tokens[(tokens >= vocab_size) | (tokens < 0)]
    if len(wrong):
        raise ValueError(
            f"{flag}: {path} holds token id {wrong.max()}, but the tokenizer has {vocab_size} tokens; "
            "was it made with another tokenizer?"
        )


def parse_blend(values: list[str], flag: str) -> Blend:
    """Parse `PREFIX`, `PREFIX PREFIX ...` or `WEIGHT PREFIX WEIGHT PREFIX ...` as Megatron-LM does."""
    numbers = [_is_number(value) for value in values]
    pairs = len(values) % 2 == 0
    if any(numbers) and not (pairs and all(numbers[::2])):
        raise ValueError(f"{flag} {' '.join(values)}: give either prefixes only, or WEIGHT PREFIX pairs")
    prefixes, weights = get_blend_from_list(values)
    if weights is not None and not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"{flag} {' '.join(values)}: weights must be positive")
    return prefixes, weights


def check_split(split: str) -> None:
    """Refuse a `--split` unless it has one to three shares (training, validation, test) and a training share above 0.

    `check_split` ignores quotes around `split`, as Megatron-LM does, because Megatron-LM's scripts may pass quotes.
    """
    shares = split.strip("'\"").split(",")
    if len(shares) > len(SPLITS) or not all(_is_number(share) and 0 <= float(share) < math.inf for share in shares):
        raise ValueError(f"--split {split}: give up to three shares, for example 969,30,1")
    if float(shares[0]) == 0:
        raise ValueError(f"--split {split}: the share of the training data is 0")


def check_split_sizes(file: TokenFile, split: str | None, min_tokens: int, flag: str) -> None:
    """Refuse a file if any split with a share above 0 gets fewer than `min_tokens` of the file's tokens.

    megatron-core would never finish the index of a split without tokens. `split` is None if the file is not divided
    into splits.
    """
    count = len(file.lengths)
    if split is None:
        if not file.has_tokens(0, count, min_tokens):
            raise ValueError(f"{flag}: {file.prefix} holds fewer than {min_tokens} tokens")
        return
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for name, bounds in zip(SPLITS, matrix, strict=True):
        if bounds is None:
            continue
        first, end = (round(bound * float(count)) for bound in bounds)  # as the builder rounds
        if not file.has_tokens(first, end, min_tokens):
            raise ValueError(
                f"--split {split}: the {name} split gets {end - first} of the {count} documents of {flag} "
                f"{file.prefix}, fewer than {min_tokens} tokens; give this split a larger share, or 0"
            )


def fingerprint(lengths: np.ndarray) -> str:
    """Return a digest of `lengths` [num_sequences]: of its size, up to 64 evenly spaced parts, and the last part."""
    digest = hashlib.sha256(str(lengths.shape[0]).encode())
    block = 1 << 14
    starts = range(0, lengths.shape[0], max(block, math.ceil(lengths.shape[0] / 64)))
    for start in (*starts, max(0, lengths.shape[0] - block)):
        digest.update(np.ascontiguousarray(lengths[start : start + block]).tobytes())
    return digest.hexdigest()[:16]


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False
