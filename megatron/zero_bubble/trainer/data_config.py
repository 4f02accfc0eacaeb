"""Checks the data flags and the data files before any communication, and configures megatron-core's datasets."""

from __future__ import annotations

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

from megatron.zero_bubble.trainer.arguments import Arguments, DataFlags
from megatron.zero_bubble.trainer.data_files import (
    SPLITS,
    Blend,
    check_split,
    check_split_sizes,
    check_vocabulary,
    open_token_file,
    parse_blend,
)


def check_data(args: Arguments, vocab_size: int | None = None) -> None:
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
    for flag, (prefixes, weights) in _blends(args).items():
        # In a blend without weights, each dataset is read for one epoch, and must therefore contain a whole sample.
        holds_samples = weights is None and len(prefixes) > 1 and not args.variable_seq_lengths
        min_tokens = args.seq_length + 1 if holds_samples else 1
        for prefix in prefixes:
            file = open_token_file(prefix, flag)
            if vocab_size is not None:
                check_vocabulary(file, vocab_size, flag)
            check_split_sizes(file, split, min_tokens, flag)


def _blends(args: Arguments) -> dict[str, Blend]:
    """Return the blend of datasets that each given data flag describes, in a dictionary with the flags as keys."""
    paths = {"--data-path": args.data_path}
    paths |= {f"--{name}-data-path": getattr(args, f"{name}_data_path") for name in SPLITS}
    return {flag: parse_blend(values, flag) for flag, values in paths.items() if values}


def requested_samples(args: Arguments) -> tuple[int, int, int]:
    """Return the numbers of training, validation and test samples of a run; `args` must have all defaults filled in."""
    evaluations = args.train_iters // args.eval_interval + 1
    per_evaluation = args.eval_iters * args.global_batch_size
    return args.train_iters * args.global_batch_size, evaluations * per_evaluation, per_evaluation


def check_rest(args: Arguments, samples: tuple[int, ...], iteration: int, used: tuple[int, int]) -> None:
    """Refuse data that ends before the last iteration of a run that resumes after iteration `iteration`.

    Args:
        samples: the number of samples in each split of this run's data.
        used: numbers of training and validation samples that the saved run has read.

    Raises:
        ValueError: too little data is left; the message is one line.
    """
    iterations, batch = args.train_iters - iteration, args.global_batch_size
    evaluations = (args.train_iters // args.eval_interval - iteration // args.eval_interval) * args.eval_iters
    of_evaluation = f"--eval-interval {args.eval_interval} --eval-iters {args.eval_iters} "
    rows = (("train", iterations, "", ""), ("valid", evaluations, of_evaluation, ", or --eval-iters 0"))
    for have, read, (split, batches, flags, instead) in zip(samples, used, rows, strict=False):
        need = batches * batch
        if need > 0 and 0 < have < read + need:
            raise ValueError(
                f"{flags}--global-batch-size {batch}: the {split} data has {have} samples for this, of which the run "
                f"in --load has used {read}, and {need} more are needed: give that run's values{instead}"
            )


def dataset_config(args: Arguments, tokenizer: MegatronTokenizerBase) -> GPTDatasetConfig:
    """Return megatron-core's dataset configuration for the flags `args`."""
    blends = _blends(args)
    per_split = [blends.get(f"--{name}-data-path") for name in SPLITS]
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blends.get("--data-path"),
        blend_per_split=per_split if any(per_split) else None,
        split=args.split if args.data_path else None,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # Only --reset-attention-mask needs masks [b, 1, s, s] in the data; attention is otherwise causal.
        create_attention_mask=args.reset_attention_mask,
        mmap_bin_files=not args.no_mmap_bin_files,
    )
