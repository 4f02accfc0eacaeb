"""The flags of `pretrain_gpt.py`. Names and meanings are Megatron-LM's; ours begin with `--zero-bubble`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.zero_bubble.job.aliases import AliasFlags, translated
from megatron.zero_bubble.job.flag_parser import flag, parse_flags
from megatron.zero_bubble.job.flags import ParallelFlags, ReplicaFlags, ZeroBubbleFlags

TORCH_BACKENDS = ("flash", "fused")
"""Values of --attention-backend with which local layers compute attention with torch's kernels."""


@dataclass(frozen=True)
class ModelFlags:
    """Model."""

    num_layers: int = flag("number of transformer layers")
    hidden_size: int = flag("width of the residual stream")
    num_attention_heads: int = flag("number of attention heads")
    seq_length: int = flag("tokens in a sequence")
    max_position_embeddings: int | None = flag("largest position that is embedded (default: --seq-length)", None)
    ffn_hidden_size: int | None = flag(
        "width of the MLP (default: 4 x hidden size; with --swiglu two thirds of it)", None
    )
    kv_channels: int | None = flag("width of one attention head (default: hidden size / heads)", None)
    group_query_attention: bool = flag("share keys and values among groups of heads", False)
    num_query_groups: int = flag("number of groups for --group-query-attention", 1)
    position_embedding_type: str = flag("kind of positions", "learned_absolute", choices=("learned_absolute", "rope"))
    no_position_embedding: bool = flag("no learned positions: what rope implies", False)
    rotary_base: int = flag("base of the rotary frequencies", 10000)
    rotary_percent: float = flag("part of a head's channels that is rotated", 1.0)
    swiglu: bool = flag("gated SiLU in the MLP instead of GeLU", False)
    normalization: str = flag("kind of normalization", "LayerNorm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag("epsilon of the normalization", 1e-5)
    apply_layernorm_1p: bool = flag("store the normalization's weights as their difference from 1", False)
    untie_embeddings_and_output_weights: bool = flag("give the output layer weights of its own", False)
    disable_bias_linear: bool = flag("no bias in linear layers", False)
    attention_dropout: float = flag("dropout of attention weights", 0.1)
    hidden_dropout: float = flag("dropout of the residual branches", 0.1)
    init_method_std: float = flag("standard deviation of the initial weights", 0.02)
    make_vocab_size_divisible_by: int = flag("pad the vocabulary to a multiple of this times the tensor size", 128)
    num_experts: int | None = flag("experts of each layer's MLP (default: one dense MLP)", None)
    moe_router_topk: int = flag("experts that a token is sent to", 2)
    moe_router_load_balancing_type: str = flag(
        "how the router balances experts", "aux_loss", choices=("aux_loss", "seq_aux_loss", "sinkhorn", "none")
    )
    moe_aux_loss_coeff: float = flag("weight of the loss that balances experts", 0.0)
    moe_token_dispatcher_type: str = flag(
        "how tokens reach their experts", "allgather", choices=("allgather", "alltoall")
    )
    moe_grouped_gemm: bool = flag("compute a rank's experts together", False)
    mtp_num_layers: int | None = flag(
        "number of additional future tokens to predict, each with its own layer on the last stage", None
    )
    mtp_loss_scaling_factor: float = flag("weight of the mean loss of --mtp-num-layers", 0.1)
    transformer_impl: str = flag(
        "layers: megatron-core's own, or Transformer Engine's", "local", choices=("local", "transformer_engine")
    )
    attention_backend: str = flag(
        "kernels of attention; for local layers flash and fused are torch's, local and unfused megatron-core's, auto "
        "torch's on a GPU",
        "auto",
        choices=("flash", "fused", "unfused", "local", "auto"),
    )
    cross_entropy_loss_fusion: bool = flag("compute the loss with fewer kernels and one reduction", False)
    no_masked_softmax_fusion: bool = flag("accepted without effect: scores are never masked by a fused kernel", False)
    fp8_format: str | None = flag("compute linear layers in fp8, on a GPU", None, choices=("e4m3", "hybrid"))
    fp8_amax_history_len: int = flag("steps of which the largest value decides a delayed scale", 1)
    fp8_amax_compute_algo: str = flag(
        "which of --fp8-amax-history-len's values counts", "most_recent", choices=("most_recent", "max")
    )
    fp8_param_gather: bool = flag("gather parameters in fp8, with --use-distributed-optimizer", False)
    use_mcore_models: bool = flag("accepted without effect: all models are megatron-core's", False)
    no_gradient_accumulation_fusion: bool = flag(
        "compute and accumulate weight gradients in two kernels, even if apex's fused kernel is installed", False
    )


@dataclass(frozen=True)
class TrainingFlags:
    """Training."""

    micro_batch_size: int = flag("sequences in a microbatch, on one data-parallel rank")
    global_batch_size: int | None = flag("sequences in an iteration (default: one microbatch on each replica)", None)
    rampup_batch_size: list[int] | None = flag(
        "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES", None, nargs=3
    )
    train_iters: int | None = flag("number of iterations", None)
    train_samples: int | None = flag("number of sequences, instead of --train-iters", None)
    lr: float = flag("highest learning rate")
    min_lr: float = flag("lowest learning rate", 0.0)
    decoupled_lr: float | None = flag("highest learning rate of embedding and output layer (default: --lr)", None)
    decoupled_min_lr: float | None = flag("lowest learning rate of embedding and output layer", None)
    lr_decay_style: str = flag(
        "shape of the decay", "linear", choices=("constant", "linear", "cosine", "inverse-square-root")
    )
    lr_decay_iters: int | None = flag("iterations of decay (default: --train-iters)", None)
    lr_decay_samples: int | None = flag("sequences of decay, with --train-samples (default: all)", None)
    lr_warmup_iters: int = flag("iterations of linear warm-up", 0)
    lr_warmup_samples: int = flag("sequences of linear warm-up, with --train-samples", 0)
    lr_warmup_fraction: float | None = flag("warm-up as a fraction of the decay, instead of iterations", None)
    weight_decay: float = flag("weight decay", 0.01)
    clip_grad: float = flag("largest global gradient norm; 0: no clipping", 1.0)
    optimizer: str = flag("optimizer", "adam", choices=("adam", "sgd"))
    sgd_momentum: float = flag("SGD's momentum", 0.9)
    adam_beta1: float = flag("decay rate of Adam's first moment", 0.9)
    adam_beta2: float = flag("decay rate of Adam's second moment", 0.999)
    adam_eps: float = flag("Adam's epsilon", 1e-8)
    bf16: bool = flag("train in bfloat16 with fp32 master weights", False)
    fp16: bool = flag("train in float16 with fp32 master weights and a loss scale", False)
    loss_scale: float | None = flag("constant loss scale (default: adaptive)", None)
    initial_loss_scale: float = flag("loss scale to start from", 2.0**32)
    min_loss_scale: float = flag("lowest loss scale", 1.0)
    loss_scale_window: int = flag("iterations without overflow after which the scale grows", 1000)
    hysteresis: int = flag("overflows after which the scale shrinks", 2)
    calculate_per_token_loss: bool = flag("average the loss over tokens, not over microbatches", False)
    recompute_activations: bool = flag("the same as --recompute-granularity selective", False)
    recompute_granularity: str | None = flag("what to recompute in backward", None, choices=("selective", "full"))
    recompute_method: str | None = flag("which layers full recomputation covers", None, choices=("uniform", "block"))
    recompute_num_layers: int | None = flag("layers of one recomputed unit, or of the recomputed block", None)
    accumulate_allreduce_grads_in_fp32: bool = flag(
        "accumulate and reduce gradients in fp32 (always with --bf16)", False
    )
    zero_bubble_reduce_every_microbatch: bool = flag(
        "reduce the gradients of --use-torch-fsdp2 after every W of a layer, not after its last: no rank then holds "
        "whole gradients",
        False,
    )
    grad_reduce_in_bf16: bool = flag("accumulate and reduce gradients in bfloat16, with --bf16", False)
    no_check_for_nan_in_loss_and_grad: bool = flag(
        "continue if a loss, gradient or weight is not finite, instead of ending before the step; with an adaptive "
        "loss scale training always continues and skips such steps",
        False,
    )
    seed: int = flag("seed of initialisation, dropout and the order of data", 1234)
    exit_interval: int | None = flag("exit after an iteration whose number is a multiple of this", None)
    exit_duration_in_mins: float | None = flag("save and exit after this many minutes", None)
    exit_signal_handler: bool = flag("save and exit on SIGTERM", False)
    manual_gc: bool = flag("collect garbage at the same iterations on all ranks, and nowhere else", False)
    manual_gc_interval: int = flag("iterations between --manual-gc's collections; 0: only around evaluations", 0)
    no_manual_gc_eval: bool = flag("do not collect garbage around evaluations", False)
    empty_unused_memory_level: int = flag(
        "give the GPU memory that the allocator holds unused back after every backward (1), and every step (2)", 0
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
        choices=("HuggingFaceTokenizer", "GPT2BPETokenizer", "Llama2Tokenizer", "NullTokenizer"),
    )
    tokenizer_model: str | None = flag(
        "tokenizer.json, or a folder that holds it; with Llama2Tokenizer SentencePiece's tokenizer.model", None
    )
    tiktoken_pattern: str | None = flag(
        "accepted without effect: only TikTokenizer reads it", None, choices=("v1", "v2")
    )
    vocab_file: str | None = flag("vocabulary of GPT2BPETokenizer", None)
    merge_file: str | None = flag("merges of GPT2BPETokenizer", None)
    vocab_size: int | None = flag("vocabulary of NullTokenizer", None)
    num_workers: int = flag("processes that load data", 2)
    dataloader_type: str = flag("order of samples", "single", choices=("single", "cyclic"))
    reset_position_ids: bool = flag("count positions anew after an end of document", False)
    reset_attention_mask: bool = flag("attend only within a document", False)
    no_create_attention_mask_in_dataloader: bool = flag(
        "accepted without effect: masks are made only for --reset-attention-mask", False
    )
    no_mmap_bin_files: bool = flag("read tokens from files without mapping these into memory", False)
    eod_mask_loss: bool = flag("no loss at the end of a document", False)


@dataclass(frozen=True)
class OutputFlags:
    """Output, evaluation, checkpoints."""

    log_interval: int = flag("iterations between log lines", 100)
    log_throughput: bool = flag("log TFLOP/s per GPU", False)
    log_memory_interval: int | None = flag(
        "iterations between log lines with the memory of every rank (CUDA only)", None
    )
    timing_log_level: int = flag("detail of megatron-core's timers, 0 to 2", 0)
    tensorboard_dir: str | None = flag("folder for TensorBoard", None)
    tensorboard_log_interval: int = flag("iterations between TensorBoard entries", 1)
    wandb_project: str | None = flag("Weights & Biases project", None)
    wandb_exp_name: str | None = flag("Weights & Biases run name", None)
    profile: bool = flag("profile some iterations: for nsys on a GPU; with torch's profiler on a CPU", False)
    use_pytorch_profiler: bool = flag("profile with torch's profiler, which writes to --tensorboard-dir", False)
    profile_step_start: int = flag("iteration after which --profile begins", 10)
    profile_step_end: int = flag("iteration with which --profile ends", 12)
    profile_ranks: list[int] | None = flag("ranks that --profile profiles (default: 0)", None, nargs="+")
    log_num_zeros_in_grad: bool = flag("count the zeros in the gradients", False)
    log_numerics: str | None = flag("file for one JSON line an iteration: exact loss, gradient norm, parameters", None)
    eval_interval: int = flag("iterations between evaluations", 1000)
    eval_iters: int = flag("iterations of an evaluation; 0: no evaluation", 100)
    save: str | None = flag("folder for checkpoints", None)
    load: str | None = flag("folder to resume from", None)
    save_interval: int | None = flag("iterations between checkpoints", None, names=("--persistent-save-interval",))
    ckpt_format: str = flag("format of checkpoints", "torch_dist", choices=("torch_dist",))
    override_opt_param_scheduler: bool = flag(
        "take the learning rate's schedule from the flags, if the checkpoint has another one",
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
    zero_bubble_no_checksums: bool = flag("neither save checksums of a checkpoint's files nor check them", False)


@dataclass(frozen=True)
class Arguments(
    ModelFlags, ParallelFlags, ReplicaFlags, TrainingFlags, DataFlags, OutputFlags, ZeroBubbleFlags, AliasFlags
):
    """All flags of the trainer, with this process's ranks and the size of the vocabulary."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    padded_vocab_size: int = 0
    """Rows of the embedding; 0 until the tokenizer is known."""

    @property
    def checks_finite(self) -> bool:
        """Whether training ends at a loss, gradient or weight that is not finite; never with an adaptive loss scale."""
        return not self.no_check_for_nan_in_loss_and_grad and (not self.fp16 or self.loss_scale is not None)

    @property
    def fp8(self) -> str | None:
        """What Megatron-LM's arguments call the value of `--fp8-format`."""
        return self.fp8_format

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.ranks_of_replica


FLAG_GROUPS = Arguments.__bases__
"""The groups of flags in the order in which `--help` shows them."""


def parse_arguments(argv: Sequence[str], prog: str = "pretrain_gpt.py") -> Arguments:
    """Parse the trainer's command line; aliases are replaced by our flags.

    Raises:
        ValueError: a flag is unknown, missing or malformed, or an alias contradicts another flag.
    """
    return translated(parse_flags(Arguments, FLAG_GROUPS, argv, prog))
