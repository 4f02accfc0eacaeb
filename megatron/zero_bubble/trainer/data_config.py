"""The settings of the data, and their checks before any communication."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

from megatron.zero_bubble.trainer.arguments import DataFlags
from megatron.zero_bubble.trainer.data_files import (
    SPLITS,
    Blend,
    check_split,
    check_split_sizes,
    check_vocabulary,
    open_token_file,
    parse_blend,
)
from megatron.zero_bubble.trainer.size_checks import host_memory


@dataclass(frozen=True, kw_only=True)
class DataConfig(DataFlags):
    """The flags of the data, with those of the training that decide about it."""

    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    train_iters: int
    train_samples: int | None = None
    """Samples of the whole training if the flags count them instead of iterations."""
    eval_interval: int = 1000
    eval_iters: int = 0
    """Iterations of one evaluation; 0 builds no validation and test data beyond what --split demands."""
    seed: int = 1234
    length_multiple: int = 1
    """With `variable_seq_lengths`, the number of tokens of a sequence is a multiple of this."""
    create_attention_mask: bool = False
    """Send attention masks [b, 1, s, s] with the data: `reset_attention_mask` needs them, causal attention does not."""

    def validate(self, vocab_size: int | None = None) -> None:
        """Check every file without communication, on any rank; `checks.py` has checked the flags one by one.

        Tokens of the files are compared with the tokenizer's `vocab_size`. Raises `ValueError` in one line.
        """
        if (self.valid_data_path or self.test_data_path) and not self.train_data_path:
            raise ValueError("--valid-data-path and --test-data-path need --train-data-path")
        if self.train_data_path and self.split != DataFlags.split:
            raise ValueError(f"--split {self.split} cuts --data-path; it has no meaning with --train-data-path")
        self._validate_index_size()
        split = self.split if self.data_path else None
        if split is not None:
            check_split(split)
        for flag, (prefixes, weights) in self._blends().items():
            # Each dataset of a blend without weights is one epoch long, so it must hold a whole sample.
            holds_samples = weights is None and len(prefixes) > 1 and not self.variable_seq_lengths
            min_tokens = self.seq_length + 1 if holds_samples else 1
            for prefix in prefixes:
                file = open_token_file(prefix, flag)
                if vocab_size is not None:
                    check_vocabulary(file, vocab_size, flag)
                check_split_sizes(file, split, min_tokens, flag)

    def _validate_index_size(self) -> None:
        """Raise `ValueError` for a run with so many samples that their index does not fit in this machine's memory."""
        counts_samples = self.train_samples is not None
        iterations = f"--train-samples {self.train_samples}" if counts_samples else f"--train-iters {self.train_iters}"
        evaluations = f"{iterations} --eval-interval {self.eval_interval} --eval-iters {self.eval_iters}"
        memory = host_memory()
        for name, count, flags in zip(SPLITS, self.num_samples, (iterations, evaluations, evaluations), strict=True):
            needed = self.index_bytes(count)
            if needed > memory:
                raise ValueError(
                    f"{flags} --global-batch-size {self.global_batch_size}: an index of {count} {name} samples takes "
                    f"{needed / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f}"
                )

    def index_bytes(self, num_samples: int) -> int:
        """Least memory in bytes of megatron-core's index of `num_samples` samples of a split.

        The index has an entry of three numbers for every sample of the run, including repetitions of the data. Only
        a blend without weights is never repeated.
        """
        one_epoch = all(len(prefixes) > 1 and weights is None for prefixes, weights in self._blends().values())
        return 0 if one_epoch and not self.mock_data else 12 * num_samples

    def _blends(self) -> dict[str, Blend]:
        """The blend of each data flag that is given, by flag."""
        paths = {"--data-path": self.data_path}
        paths |= {f"--{name}-data-path": getattr(self, f"{name}_data_path") for name in SPLITS}
        return {flag: parse_blend(values, flag) for flag, values in paths.items() if values}

    @property
    def num_samples(self) -> tuple[int, int, int]:
        """Samples that the run reads from train, valid and test, counted as Megatron does."""
        evaluations = self.train_iters // self.eval_interval + 1
        per_evaluation = self.eval_iters * self.global_batch_size
        train = self.train_samples or self.train_iters * self.global_batch_size
        return train, evaluations * per_evaluation, per_evaluation

    def check_rest(self, num_samples: tuple[int, int, int], iteration: int, used: tuple[int, int]) -> None:
        """Refuse to continue after `iteration` with data that would be used up before the last iteration.

        `used` are the training and validation samples that the run of the checkpoint has read; `num_samples` are the
        samples that the flags of this run give. Raises `ValueError` in one line.
        """
        if self.dataloader_type == "cyclic":
            return
        batch = self.global_batch_size
        evaluations = self.train_iters // self.eval_interval - iteration // self.eval_interval
        still_needed = (
            self.train_samples - used[0] if self.train_samples else (self.train_iters - iteration) * batch,
            evaluations * self.eval_iters * batch,
        )
        batch_size = f"--global-batch-size {batch}"
        flags = (batch_size, f"--eval-interval {self.eval_interval} --eval-iters {self.eval_iters} {batch_size}")
        instead = ("--dataloader-type cyclic, which repeats the data", "--eval-iters 0")
        for split in (0, 1):
            have, need = num_samples[split], still_needed[split]
            if need > 0 and 0 < have < used[split] + need:
                raise ValueError(
                    f"{flags[split]}: the {SPLITS[split]} data has {have} samples for this, of which the run in --load "
                    f"has used {used[split]}, and {need} more are needed: give what that run had, or {instead[split]}"
                )

    def dataset_config(self, tokenizer: MegatronTokenizerBase) -> GPTDatasetConfig:
        """The settings as a configuration of megatron-core's datasets."""
        blends = self._blends()
        per_split = [blends.get(f"--{name}-data-path") for name in SPLITS]
        return GPTDatasetConfig(
            random_seed=self.seed,
            sequence_length=self.seq_length,
            blend=blends.get("--data-path"),
            blend_per_split=per_split if any(per_split) else None,
            split=self.split if self.data_path else None,
            path_to_cache=self.data_cache_path,
            tokenizer=tokenizer,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            eod_mask_loss=self.eod_mask_loss,
            create_attention_mask=self.create_attention_mask,
            mmap_bin_files=not self.no_mmap_bin_files,
        )
