"""Defines the flags of `pretrain_gpt.py`; a flag that Megatron-LM also has keeps Megatron-LM's name.

`core_flags.py` makes flags from fields of megatron-core's configurations. `session/flags.py` lists the flags that the
trainer and the launcher share, and `session/aliases.py` lists other names of these flags. This module defines the
remaining flags of `pretrain_gpt.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, make_dataclass
from typing import Any

from megatron.zero_bubble.session.aliases import AliasFlags, translated
from megatron.zero_bubble.session.flag_parser import flag, parse_flags, take_flags
from megatron.zero_bubble.session.flags import ParallelFlags, ReplicaFlags, ZeroBubbleFlags, flag_name
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.trainer.core_flags import flag_groups

TORCH_BACKENDS = ("flash", "fused")
"""Values of --attention-backend for which local layers compute attention with torch's kernels."""
_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
"""The name of the flag of a hybrid model's layer pattern, and its older name."""


@dataclass(frozen=True)
class ModelFlags:
    """Model."""

    seq_length: int = flag("tokens in a sequence", MISSING)
    hybrid_layer_pattern: str | None = flag(
        "layers of a hybrid model, one symbol each: * attention, - MLP, E experts, M Mamba, from megatron-core 0.17 on "
        "G gated delta net, from 0.19 on + latent attention; | between stages, or the layout is chosen or even; from "
        "0.17 on / before each layer of multi-token prediction",
        names=_PATTERNS[1:],
    )
    max_position_embeddings: int = flag("largest position that is embedded (default: --seq-length)", None)
    group_query_attention: bool = flag("share keys and values among groups of heads", False)
    use_rope_scaling: bool = flag("scale rotary frequencies as Llama 3.1 does", False)
    rope_scaling_factor: float = flag("factor of --use-rope-scaling", 8.0)
    rotary_seq_len_interpolation_factor: int | None = flag("divide rotary positions by this number", None)
    position_embedding_type: str = flag("kind of positions", "learned_absolute", choices=("learned_absolute", "rope"))
    no_position_embedding: bool = flag("no learned positions; implied by --position-embedding-type rope", False)
    swiglu: bool = flag("gated SiLU in the MLP instead of GeLU", False)
    quick_geglu: bool = flag("gated quick GeLU in the MLP instead of GeLU", False)
    squared_relu: bool = flag("squared ReLU in the MLP instead of GeLU", False)
    untie_embeddings_and_output_weights: bool = flag("give the output layer weights of its own", False)
    make_vocab_size_divisible_by: int = flag("pad the vocabulary to a multiple of this, times the tensor size", 128)
    no_masked_softmax_fusion: bool = flag("accepted without effect: scores are never masked by a fused kernel", False)
    attention_softmax_in_fp32: bool = flag("accepted without effect: the softmax is always in fp32", False)
    no_persist_layer_norm: bool = flag("accepted without effect: norms never use the persistent kernel", False)
    no_rope_fusion: bool = flag("accepted without effect: rotary embeddings are never fused", False)
    no_bias_gelu_fusion: bool = flag("compute bias and GeLU in separate kernels, as local layers always do", False)
    no_bias_swiglu_fusion: bool = flag("compute bias and SwiGLU in separate kernels, as local layers always do", False)
    use_mcore_models: bool = flag("accepted without effect: all models are megatron-core's", False)
    no_gradient_accumulation_fusion: bool = flag(
        "compute and accumulate weight gradients in two kernels, even if apex's fused kernel is installed", False
    )


@dataclass(frozen=True)
class TrainingFlags:
    """Training."""

    micro_batch_size: int = flag("sequences in a microbatch, on one data-parallel rank", MISSING)
    global_batch_size: int = flag("sequences in an iteration (default: one microbatch on each replica)", None)
    rampup_batch_size: list[int] | None = flag(
        "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES", None, nargs=3
    )
    train_iters: int = flag("number of iterations", None)
    lr_decay_style: str = flag(
        "shape of the decay", "linear", choices=("constant", "linear", "cosine", "inverse-square-root")
    )
    lr_decay_iters: int | None = flag("iterations of decay (default: --train-iters)", None)
    lr_warmup_iters: int = flag("iterations of linear warm-up", 0)
    lr_warmup_fraction: float | None = flag("warm-up as a fraction of the decay, instead of iterations", None)
    recompute_activations: bool = flag("the same as --recompute-granularity selective", False)
    accumulate_allreduce_grads_in_fp32: bool = flag(
        "accumulate and reduce gradients in fp32 (always with --bf16)", False
    )
    zero_bubble_reduce_every_microbatch: bool = flag(
        "with --use-torch-fsdp2, reduce a layer's gradients after every W instead of after the last W, so that no rank "
        "holds whole gradients",
        False,
    )
    grad_reduce_in_bf16: bool = flag("accumulate and reduce gradients in bfloat16, with --bf16", False)
    no_check_for_nan_in_loss_and_grad: bool = flag(
        "continue if a loss, gradient or weight is not finite, instead of ending before the step; with an adaptive "
        "loss scale training always continues and skips such steps",
        False,
    )
    seed: int = flag("seed of initialisation, dropout and the order of data", 1234)
    exit_interval: int | None = flag("exit after an iteration whose number is a multiple of this number", None)
    exit_duration_in_mins: float | None = flag("save and exit after this many minutes", None)
    exit_signal_handler: bool = flag("save and exit on SIGTERM or Ctrl-C", False)
    manual_gc: bool = flag("accepted without effect: Python decides when it collects garbage", False)
    manual_gc_interval: int = flag("accepted without effect, as --manual-gc", 0)
    no_manual_gc_eval: bool = flag("accepted without effect, as --manual-gc", False)
    empty_unused_memory_level: int = flag(
        "release the allocator's unused GPU memory after every backward (1), and also after every step (2)", 0
    )


@dataclass(frozen=True)
class DataFlags:
    """Data."""

    data_path: list[str] | None = flag(
        "prefix of a .bin/.idx pair, or weight prefix weight prefix ...", None, nargs="*"
    )
    split: str = flag("parts of --data-path for training, validation and test", "969,30,1")
    train_data_path: list[str] | None = flag("as --data-path, for training only", None, nargs="*")
    valid_data_path: list[str] | None = flag("as --data-path, for validation only", None, nargs="*")
    test_data_path: list[str] | None = flag("as --data-path, for test only", None, nargs="*")
    data_cache_path: str | None = flag("folder for index caches", None)
    mock_data: bool = flag("train on megatron-core's synthetic data", False)
    tokenizer_type: str | None = flag(
        "kind of tokenizer (default: GPT2BPETokenizer with --vocab-file and --merge-file, NullTokenizer with "
        "--mock-data)",
        None,
        choices=("HuggingFaceTokenizer", "GPT2BPETokenizer", "NullTokenizer"),
    )
    tokenizer_model: str | None = flag("path of tokenizer.json, or of the folder that contains this file", None)
    tiktoken_pattern: str | None = flag(
        "accepted without effect: only TikTokenizer reads it", None, choices=("v1", "v2")
    )
    vocab_file: str | None = flag("vocabulary of GPT2BPETokenizer", None)
    merge_file: str | None = flag("merges of GPT2BPETokenizer", None)
    vocab_size: int | None = flag("vocabulary of NullTokenizer", None)
    num_workers: int = flag("processes that load data", 2)
    dataloader_type: str = flag("order of samples: the dataset's", "single", choices=("single",))
    variable_seq_lengths: bool = flag(
        "each document, cut at --seq-length tokens, is a sample; pad each microbatch to its longest sample", False
    )
    reset_position_ids: bool = flag("restart positions at 0 after the end of a document", False)
    reset_attention_mask: bool = flag("attend only within a document", False)
    no_create_attention_mask_in_dataloader: bool = flag(
        "accepted without effect: masks are made only for --reset-attention-mask", False
    )
    no_mmap_bin_files: bool = flag("read tokens from files that are not mapped into memory", False)
    eod_mask_loss: bool = flag("no loss at the end of a document", False)


@dataclass(frozen=True)
class OutputFlags:
    """Output, evaluation, checkpoints."""

    log_interval: int = flag("iterations between log lines", 100)
    log_memory_interval: int | None = flag(
        "iterations between log lines with the memory of every rank (CUDA only)", None
    )
    timing_log_level: int = flag("detail of megatron-core's timers, 0 to 2", 0)
    log_numerics: str | None = flag("file for one JSON line an iteration: exact loss, gradient norm, parameters", None)
    eval_interval: int = flag("iterations between evaluations", 1000)
    eval_iters: int = flag("iterations of an evaluation; 0: no evaluation", 100)
    save: str | None = flag("folder for checkpoints", None)
    load: str | None = flag("folder to resume from", None)
    save_interval: int | None = flag("iterations between checkpoints", None, names=("--persistent-save-interval",))
    ckpt_format: str = flag("format of checkpoints", "torch_dist", choices=("torch_dist",))
    override_opt_param_scheduler: bool = flag(
        "take the learning rate's schedule from the flags, if the schedule in the checkpoint differs",
        False,
        names=("--override-opt_param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        "take the learning rate's schedule from the checkpoint, if it differs from the flags",
        False,
        names=("--use-checkpoint-opt_param-scheduler",),
    )
    finetune: bool = flag("load only the model and begin at iteration 0", False)
    no_load_optim: bool = flag("do not load the optimizer", False)
    no_load_rng: bool = flag("do not load the random state", False)


@dataclass(frozen=True)
class MegatronFlags:
    """Flags of Megatron-LM that `pretrain_gpt.py` refuses, and that `zero-bubble estimate` ignores."""

    train_samples: int | None = flag("length in sequences", None)
    lr_decay_samples: int | None = flag("length in sequences", None)
    lr_warmup_samples: int | None = flag("length in sequences", None)
    log_throughput: bool = flag("TFLOP/s in the log line", False)
    tensorboard_dir: str | None = flag("TensorBoard", None)
    tensorboard_log_interval: int | None = flag("TensorBoard", None)
    wandb_project: str | None = flag("Weights & Biases", None)
    wandb_exp_name: str | None = flag("Weights & Biases", None)
    profile: bool = flag("torch's profiler", False)
    use_pytorch_profiler: bool = flag("torch's profiler", False)
    profile_step_start: int | None = flag("torch's profiler", None)
    profile_step_end: int | None = flag("torch's profiler", None)
    profile_ranks: list[int] | None = flag("torch's profiler", None, nargs="+")


_LISTED = (ModelFlags, ParallelFlags, ReplicaFlags, TrainingFlags, DataFlags, OutputFlags, ZeroBubbleFlags, AliasFlags)
_OF_CORE = flag_groups({entry.name for group in _LISTED for entry in fields(group)})
FLAG_GROUPS = (*_OF_CORE, *_LISTED)
"""The groups of flags in the order in which `--help` shows them."""
_CoreFlags: Any = make_dataclass("_CoreFlags", (), bases=_OF_CORE, frozen=True)


@dataclass(frozen=True)
class Arguments(
    ModelFlags,
    ParallelFlags,
    ReplicaFlags,
    TrainingFlags,
    DataFlags,
    OutputFlags,
    ZeroBubbleFlags,
    AliasFlags,
    _CoreFlags,
):
    """All flags of the trainer, the rank of this process, the number of processes and the size of the vocabulary.

    Before `complete_and_check`, `train_iters`, `global_batch_size` and `max_position_embeddings` may be None, although
    the type of these flags is `int`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    padded_vocab_size: int = 0
    """Number of rows of the embedding, with padding; 0 until the size of the vocabulary is known."""
    zero_bubble_layout_limits: tuple[float, ...] | None = None
    """The memory limit of each rank in bytes, under which the layout was chosen."""

    @property
    def checks_finite(self) -> bool:
        """Whether training ends at a loss, gradient or weight that is not finite; False with an adaptive loss scale."""
        return not self.no_check_for_nan_in_loss_and_grad and (not self.fp16 or self.loss_scale is not None)

    @property
    def fp8(self) -> Any:
        """The value of `--fp8-format`, under the name of the attribute in which Megatron-LM stores the value."""
        return self.fp8_format

    @property
    def fp4(self) -> Any:
        """The value of `--fp4-format`, under the name of the attribute in which Megatron-LM stores the value."""
        return self.fp4_format

    @property
    def pattern(self) -> HybridPattern | None:
        """The layer pattern of a hybrid model; None for a GPT model."""
        return None if self.hybrid_layer_pattern is None else HybridPattern.parse(self.hybrid_layer_pattern)

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.ranks_of_replica


def parse_arguments(
    argv: Sequence[str], prog: str = "pretrain_gpt.py", *, ignores_megatrons: bool = False
) -> Arguments:
    """Parse the trainer's command line, and replace each alias by the flag that the alias stands for.

    Args:
        ignores_megatrons: whether the flags of `MegatronFlags` are ignored instead of refused.

    Raises:
        ValueError: a flag is unknown, missing or malformed, or an alias contradicts another flag.
    """
    megatrons, argv = take_flags(MegatronFlags, (MegatronFlags,), argv)
    refused = [name for name, value in vars(megatrons).items() if value is not None and value is not False]
    if refused and not ignores_megatrons:
        raise ValueError(
            f"{flag_name(refused[0])}: {prog} does not support this flag: leave it out, or train with your own "
            "Megatron-LM (docs/megatron_lm.md)"
        )
    flag_names = {argument.split("=")[0] for argument in argv}
    if {*_PATTERNS} <= flag_names:
        raise ValueError(f"{' and '.join(_PATTERNS)} are names of one flag: give the first")
    if (text := take_flags(_PatternFlag, (_PatternFlag,), argv)[0].hybrid_layer_pattern) is not None:
        pattern = HybridPattern.parse(text)
        numbers = {"--num-layers": len(pattern.symbols), "--mtp-num-layers": pattern.num_further or None}
        added = {name: number for name, number in numbers.items() if number is not None and name not in flag_names}
        argv = [*argv, *(f"{name}={number}" for name, number in added.items())]
    try:
        return translated(parse_flags(Arguments, FLAG_GROUPS, argv, prog))
    except ValueError as error:
        if not str(error).startswith("unrecognized"):
            raise
        raise ValueError(
            f"{error}; {prog} --help lists all flags; other flags of Megatron-LM need your own Megatron-LM "
            "(docs/megatron_lm.md)"
        ) from error


@dataclass(frozen=True)
class _PatternFlag:
    """The flag of a hybrid model's layer pattern, which gives the required numbers of layers."""

    hybrid_layer_pattern: str | None = flag("the layers", names=_PATTERNS[1:])
