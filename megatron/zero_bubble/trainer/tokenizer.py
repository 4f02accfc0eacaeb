"""Loads tokenizers from local files, with the interface that megatron-core's datasets use.

megatron-core's own Hugging Face tokenizers need the `transformers` package, and look up tokenizers on the Hugging Face
hub. Importing `transformers` also takes seconds on every rank. The tokenizers of this module use only the `tokenizers`
library and read only local files, so that every rank of an offline cluster gets the same tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

from megatron.zero_bubble.session.files import reading

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_TYPES = ("HuggingFaceTokenizer", "GPT2BPETokenizer", "NullTokenizer")

END_OF_DOCUMENT_TOKENS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|endofdocument|>", "</s>"),
    *("<eos>", "<EOD>", "<eod>", "[EOS]"),
)
"""Candidates, in order, for the end-of-document token of a tokenizer whose configuration names no such token."""
_ANY = (Exception,)
"""Errors of the `tokenizers` library, which also raises bare exceptions."""


class LocalTokenizer(MegatronTokenizerBase):
    """Base class of tokenizers for megatron-core's datasets; a subclass defines `tokenize`, `detokenize` and `vocab`.

    The tokenizer has no padding token. Therefore GPTDataset pads with -1, which is not the id of any token.

    Attributes:
        vocab_size: largest token id + 1, because token ids may have gaps, and the embedding needs a row for the largest
            id.
        eod: the id of the token that ends a document.
        unique_identifiers: the entries that identify this tokenizer in a dataset's cache key.
    """

    vocab_size = 0  # replaces the abstract method of the base class

    def __init__(self, path: str, library: str, vocab_size: int, eod: int, content: bytes) -> None:
        """Set the attributes; `content` identifies this tokenizer among tokenizers of its class, whatever its path."""
        super().__init__(path, {"library": library})
        self.vocab_size, self.eod = vocab_size, eod
        digest = hashlib.sha256(content).hexdigest()
        self.unique_identifiers = OrderedDict({"class": type(self).__name__, "sha256": digest})

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of every text; a subclass may encode the texts in parallel."""
        return [self.tokenize(text) for text in texts]

    def apply_chat_template(self, *args: object, **kwargs: object) -> str:
        raise NotImplementedError("pretraining needs no chat template")


class HuggingFaceTokenizer(LocalTokenizer):
    """A tokenizer of the `tokenizers` library. Like megatron-core's tokenizers, it adds no special tokens to a text."""

    def __init__(self, tokenizer: Tokenizer, eod_token: str, path: str) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocab = self.vocab
        super().__init__(
            path, "tokenizers", max(vocab.values()) + 1, vocab[eod_token], content=tokenizer.to_str().encode()
        )

    @property
    def vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_all([text])[0]

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        # `encode_batch_fast` leaves out the offsets, which take a third of the time.
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class NullTokenizer(LocalTokenizer):
    """A tokenizer for texts of integers below `num_tokens`, separated by spaces; id `num_tokens` ends a document."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__("null", "null", num_tokens + 1, eod=num_tokens, content=str(num_tokens).encode())

    @property
    def vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.vocab_size)}

    def tokenize(self, text: str) -> list[int]:
        return [int(number) for number in text.split(" ")]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def load_tokenizer(flags: Any) -> LocalTokenizer:
    """Load the tokenizer that the flags name.

    Args:
        flags: an object with the values of these flags as attributes:
            `tokenizer_type`, one of `TOKENIZER_TYPES`;
            `tokenizer_model`, for `HuggingFaceTokenizer`, a tokenizer.json or a folder with a tokenizer.json. The
            folder's tokenizer_config.json may name the end-of-document token as `eos_token`;
            `vocab_size`, for `NullTokenizer`, the number of tokens; for other types, a number that must not be below
            the vocabulary size;
            `vocab_file`, for `GPT2BPETokenizer`, a vocab.json;
            `merge_file`, for `GPT2BPETokenizer`, a merges.txt.

    Raises:
        ValueError: a flag is missing or a file cannot be used; the message is one line that names the flag.
    """
    tokenizer_type, vocab_size = flags.tokenizer_type, flags.vocab_size
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise ValueError(f"--tokenizer-type NullTokenizer needs --vocab-size of at least 1 (got {vocab_size})")
        return NullTokenizer(vocab_size)
    if tokenizer_type == "HuggingFaceTokenizer":
        tokenizer = _from_tokenizer_json(flags.tokenizer_model)
    elif tokenizer_type == "GPT2BPETokenizer":
        tokenizer = _from_gpt2_files(flags.vocab_file, flags.merge_file)
    else:
        raise ValueError(f"--tokenizer-type {tokenizer_type} is not one of {', '.join(TOKENIZER_TYPES)}")
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ValueError(f"--vocab-size {vocab_size} is less than the tokenizer's {tokenizer.vocab_size} tokens")
    if vocab_size is not None and vocab_size != tokenizer.vocab_size:
        warnings.warn(
            f"--vocab-size {vocab_size} is ignored: the tokenizer has {tokenizer.vocab_size} tokens", stacklevel=2
        )
    return tokenizer


def _from_tokenizer_json(tokenizer_model: str | None) -> HuggingFaceTokenizer:
    if not tokenizer_model:
        raise ValueError(
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: a tokenizer.json or its folder"
        )
    given = Path(tokenizer_model)
    with reading(f"--tokenizer-model {tokenizer_model}", _ANY):
        file = given / "tokenizer.json" if given.is_dir() else given
        is_file = file.is_file()
    if not is_file:
        reason = "this folder holds no tokenizer.json" if given.is_dir() else "no such file (nothing is downloaded)"
        raise ValueError(f"--tokenizer-model {tokenizer_model}: {reason}")
    # Imported here, because a run with NullTokenizer does not need the package.
    from tokenizers import Tokenizer

    with reading(f"--tokenizer-model {file}: not a readable tokenizer.json", _ANY):
        tokenizer = Tokenizer.from_file(str(file))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    configured = _configured_eos(file.parent) if given.is_dir() else None
    candidates = (configured,) if configured else END_OF_DOCUMENT_TOKENS
    eod = next((token for token in candidates if token in vocab), None)
    if eod is None:
        raise ValueError(
            f"--tokenizer-model {tokenizer_model}: no end-of-document token; the vocabulary holds none of "
            f"{' '.join(candidates)}"
        )
    return HuggingFaceTokenizer(tokenizer, eod, str(file))


def _configured_eos(folder: Path) -> str | None:
    """Return the text of `eos_token` in the folder's tokenizer_config.json; None without the file or the entry."""
    file = folder / "tokenizer_config.json"
    with reading(f"--tokenizer-model {file}: not a readable JSON object", _ANY):
        if not file.is_file():
            return None
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    token = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(token, str | None):
        raise ValueError(f"--tokenizer-model {file}: eos_token must be the text of a token, got {token!r}")
    return token


def _from_gpt2_files(vocab_file: str | None, merge_file: str | None) -> HuggingFaceTokenizer:
    if not vocab_file or not merge_file:
        raise ValueError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
    for flag, file in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        with reading(f"{flag} {file}", _ANY):
            is_file = Path(file).is_file()
        if not is_file:
            raise ValueError(f"{flag} {file}: no such file")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    with reading(f"--vocab-file {vocab_file} --merge-file {merge_file}", _ANY):
        tokenizer = Tokenizer(models.BPE.from_file(vocab_file, merge_file))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    eod = END_OF_DOCUMENT_TOKENS[0]
    if eod not in tokenizer.get_vocab():
        raise ValueError(f"--vocab-file {vocab_file}: the vocabulary does not hold {eod}")
    return HuggingFaceTokenizer(tokenizer, eod, vocab_file)
