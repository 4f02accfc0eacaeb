"""Tokenizers: text to ids and back, the end of a document, and what a wrong file says."""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megatron.zero_bubble.trainer.defaults import with_vocabulary
from megatron.zero_bubble.trainer.tokenizer import LocalTokenizer, load_tokenizer
from tests.checked_flags import checked

TEXT = "the pipeline waits for the weights, the weights wait for nobody"


def train(*special_tokens: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None = None, **others: object) -> LocalTokenizer:
    """The tokenizer of these flags; flags that are not named are not given."""
    flags = {"vocab_size": None, "vocab_file": None, "merge_file": None} | others
    return load_tokenizer(Namespace(tokenizer_type=tokenizer_type, tokenizer_model=tokenizer_model, **flags))


def build(path: Path, **flags: int) -> LocalTokenizer:
    return build_tokenizer("HuggingFaceTokenizer", str(path), **flags)


def test_text_becomes_ids_and_ids_become_the_same_text(tmp_path: Path) -> None:
    tokenizer = build(save(train("<|endoftext|>"), tmp_path))
    ids = tokenizer.tokenize(TEXT)
    assert len(ids) < len(TEXT)
    assert tokenizer.detokenize(ids) == TEXT


def test_a_folder_that_holds_tokenizer_json_will_do(tmp_path: Path) -> None:
    file = save(train("<|endoftext|>"), tmp_path)
    assert build(tmp_path).tokenize(TEXT) == build(file).tokenize(TEXT)


def test_the_templates_special_tokens_and_the_files_truncation_are_left_out(tmp_path: Path) -> None:
    tokenizer = train("<s>", "</s>")
    plain = tokenizer.encode(TEXT).ids
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(max_length=4)
    assert build(save(tokenizer, tmp_path)).tokenize(TEXT) == plain


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_the_end_of_document_is_found_by_its_usual_names(tmp_path: Path, token: str) -> None:
    assert build(save(train("<unk>", token), tmp_path)).eod == 1


@pytest.mark.parametrize("eos", ["<stop>", {"content": "<stop>", "special": True}])
def test_the_folders_own_configuration_names_the_end_of_document(tmp_path: Path, eos: object) -> None:
    save(train("<|endoftext|>", "<stop>"), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert build(tmp_path).eod == 1


def test_the_vocabulary_reaches_to_the_largest_id_even_with_holes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 7, "</s>": 9}, unk_token="a"))
    assert build(save(tokenizer, tmp_path)).vocab_size == 10


def test_loader_processes_can_receive_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = build(save(train("</s>"), tmp_path))
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.tokenize(TEXT), copy.eod) == (tokenizer.tokenize(TEXT), tokenizer.eod)


def test_caches_know_a_tokenizer_by_its_content_not_by_its_path(tmp_path: Path) -> None:
    here = build(save(train("</s>"), tmp_path / "here")).unique_identifiers
    there = build(save(train("</s>"), tmp_path / "there")).unique_identifiers
    other = build(save(train("<eos>"), tmp_path / "other")).unique_identifiers
    assert here == there != other


def test_null_tokenizer_reads_numbers_and_ends_a_document_after_them() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.tokenize("5 0 99") == [5, 0, 99]
    assert tokenizer.eod == 100
    assert tokenizer.vocab_size == 101


def test_gpt2_files_give_the_same_ids_as_the_tokenizer_they_came_from(tmp_path: Path) -> None:
    original = train("<|endoftext|>")
    vocab_file, merge_file = original.model.save(str(tmp_path))
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)
    assert tokenizer.tokenize(TEXT) == original.encode(TEXT).ids
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    assert tokenizer.eod == 0
    assert tokenizer.eod not in tokenizer.tokenize("<|endoftext|>"), "text must not be able to end its document"


def test_a_vocab_size_that_is_too_small_is_refused_and_another_one_ignored_with_a_warning(tmp_path: Path) -> None:
    file = save(train("</s>"), tmp_path)
    size = build(file).vocab_size
    with pytest.raises(ValueError, match=rf"--vocab-size {size - 1} is less than the tokenizer's {size} tokens"):
        build(file, vocab_size=size - 1)
    with pytest.warns(UserWarning, match=rf"--vocab-size {size + 1} is ignored"):
        assert build(file, vocab_size=size + 1).vocab_size == size


@pytest.mark.parametrize(
    ("size", "divisor", "tensor_parallel", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (4096, 128, 2, 4096), (4097, 128, 2, 4352), (7, 1, 1, 7)],
)
def test_vocabulary_is_padded_as_megatron_pads_it(size: int, divisor: int, tensor_parallel: int, padded: int) -> None:
    sizes = {"make_vocab_size_divisible_by": divisor, "tensor_model_parallel_size": tensor_parallel}
    assert with_vocabulary(replace(checked({}), **sizes), size).padded_vocab_size == padded


def refused(*args: object, **kwargs: object) -> str:
    """The message of the error: one line."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the message
        build_tokenizer(*args, **kwargs)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_flags_are_named() -> None:
    assert "--tokenizer-model" in refused("HuggingFaceTokenizer")
    assert "--vocab-size" in refused("NullTokenizer")
    assert "--vocab-file and --merge-file" in refused("GPT2BPETokenizer", vocab_file="vocab.json")
    assert "HuggingFaceTokenizer, GPT2BPETokenizer, NullTokenizer" in refused("SentencePieceTokenizer")


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    assert "org/model: no such file (nothing is downloaded)" in refused("HuggingFaceTokenizer", "org/model")
    assert "holds no tokenizer.json" in refused("HuggingFaceTokenizer", str(tmp_path))
    garbage = tmp_path / "tokenizer.json"
    garbage.write_text('{"version": "1.0",\n "model": {}}')
    assert f"{garbage}: not a readable tokenizer.json" in refused("HuggingFaceTokenizer", str(garbage))
    assert "--merge-file nowhere: no such file" in refused(
        "GPT2BPETokenizer", vocab_file=str(garbage), merge_file="nowhere"
    )
    assert str(garbage) in refused("GPT2BPETokenizer", vocab_file=str(garbage), merge_file=str(garbage))


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    file = save(train("<unk>"), tmp_path)
    assert "no end-of-document token" in refused("HuggingFaceTokenizer", str(file))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    assert "<gone>" in refused("HuggingFaceTokenizer", str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json: not a readable JSON object" in refused("HuggingFaceTokenizer", str(tmp_path))


@pytest.mark.parametrize("eos", [5, ["</s>"], {"content": 5}])
def test_an_end_of_document_that_is_no_text_is_refused(tmp_path: Path, eos: object) -> None:
    save(train("</s>"), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    line = refused("HuggingFaceTokenizer", str(tmp_path))
    assert line.startswith(f"--tokenizer-model {tmp_path / 'tokenizer_config.json'}: eos_token must be the text of a ")


def test_a_folder_that_this_user_may_not_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_file(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", is_file)
    line = refused("HuggingFaceTokenizer", "closed")
    assert line == "--tokenizer-model closed: cannot be read: Permission denied"
    line = refused("GPT2BPETokenizer", vocab_file="closed", merge_file="closed")
    assert line == "--vocab-file closed: cannot be read: Permission denied"
