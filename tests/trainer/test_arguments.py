from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.trainer.arguments import FLAG_GROUPS, Arguments, parse_arguments
from megatron.zero_bubble.trainer.core_flags import flag_groups

REQUIRED = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3"),
)

MEGATRONS = """
--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention --num-query-groups
--kv-channels --seq-length --max-position-embeddings --position-embedding-type --rotary-base --rotary-percent --swiglu
--normalization --norm-epsilon --untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout
--hidden-dropout --init-method-std --make-vocab-size-divisible-by --transformer-impl
--tensor-model-parallel-size --pipeline-model-parallel-size --distributed-backend --distributed-timeout-minutes
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size
--micro-batch-size --global-batch-size --rampup-batch-size --train-iters --lr --min-lr --lr-decay-style --lr-decay-iters
--lr-warmup-iters --lr-warmup-fraction --weight-decay --clip-grad --adam-beta1 --adam-beta2 --adam-eps --bf16
--accumulate-allreduce-grads-in-fp32 --seed --exit-signal-handler --exit-interval --exit-duration-in-mins
--data-path --split --train-data-path --valid-data-path --test-data-path --data-cache-path --mock-data --tokenizer-type
--tokenizer-model --vocab-file --merge-file --vocab-size --num-workers --dataloader-type --reset-position-ids
--reset-attention-mask --eod-mask-loss
--log-interval --timing-log-level --log-num-zeros-in-grad --eval-interval --eval-iters --save --load --save-interval
--persistent-save-interval --ckpt-format --finetune --no-load-optim --no-load-rng
"""
"""What people's launch scripts say: a name that is gone breaks them."""

MEGATRON_HAS_TOO = """
--overlap-moe-expert-parallel-comm
--hybrid-layer-pattern --hybrid-override-pattern
--no-check-for-nan-in-loss-and-grad
--attention-backend --no-gradient-accumulation-fusion
--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler --override-opt-param-scheduler
--use-checkpoint-opt-param-scheduler --moe-token-dispatcher-type --calculate-per-token-loss
--moe-aux-loss-coeff --min-loss-scale --loss-scale-window --hysteresis --moe-grouped-gemm
--num-experts --moe-router-topk --context-parallel-size --expert-model-parallel-size --sequence-parallel
--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank --pipeline-model-parallel-layout
--microbatch-group-size-per-virtual-pipeline-stage --decoder-first-pipeline-num-layers
--decoder-last-pipeline-num-layers --fp16 --loss-scale --initial-loss-scale --recompute-granularity --recompute-method
--recompute-num-layers --recompute-activations
--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --log-memory-interval
--mtp-num-layers --mtp-loss-scaling-factor
--moe-grouped-gemm --optimizer --sgd-momentum --num-distributed-optimizer-instances
--apply-layernorm-1p --no-position-embedding --moe-router-load-balancing-type --cross-entropy-loss-fusion
--no-masked-softmax-fusion --fp8-format --fp8-amax-history-len --fp8-amax-compute-algo --fp8-param-gather
--use-mcore-models --decoupled-lr --decoupled-min-lr
--grad-reduce-in-bf16 --manual-gc --manual-gc-interval --no-manual-gc-eval --empty-unused-memory-level
--use-rope-scaling --rope-scaling-factor --rotary-seq-len-interpolation-factor --attention-softmax-in-fp32
--no-persist-layer-norm --no-rope-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
--tiktoken-pattern --no-create-attention-mask-in-dataloader --no-mmap-bin-files
--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward --quick-geglu --squared-relu
"""
"""Names that are not ours to give another meaning."""

IN_USE_ELSEWHERE = """
--enable-zero-bubble --zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup --zero-bubble-max-pending-backward
--zero-bubble-adaptive-memory-limit-percentile --zero-bubble-pipeline-timers-start-iter
--zero-bubble-pipeline-timers-end-iter --enable-optimizer-post-validation --enable-exactly-numeric-match
--allow-padding-num-layers
"""
"""Names that other zero-bubble pipelines gave their flags: people can move over."""

WITHOUT_OUR_NAME = {"--log-numerics", "--hierarchical-sgd", "--hierarchical-sgd-warmup"}
"""Our own flags that have nothing to do with pipelines."""
OURS = {"--zero-bubble", "--zero-bubble-schedule", *WITHOUT_OUR_NAME}


CORE_GROUPS = flag_groups(())
"""Flags that are fields of megatron-core's configurations."""


def flag_names() -> set[str]:
    return names_of(FLAG_GROUPS)


def names_of(groups: Sequence[type]) -> set[str]:
    entries = [entry for group in groups for entry in fields(group)]
    return {f"--{entry.name.replace('_', '-')}" for entry in entries} | {
        name for entry in entries for name in entry.metadata["names"]
    }


def test_every_flag_of_megatron_that_we_take_keeps_its_name():
    assert set(MEGATRONS.split()) <= flag_names()


def test_our_own_flags_say_zero_bubble():
    megatrons = {name for names in (MEGATRONS, MEGATRON_HAS_TOO, IN_USE_ELSEWHERE) for name in names.split()}
    own = flag_names() - megatrons - names_of(CORE_GROUPS)
    assert own >= OURS
    assert {name for name in own if "zero-bubble" not in name} == WITHOUT_OUR_NAME


def test_defaults_are_megatrons():
    args = parse_arguments(REQUIRED)
    expected = {
        "optimizer": "adam", "sgd_momentum": 0.9,
        "min_lr": 0.0, "lr_decay_style": "linear", "lr_warmup_iters": 0, "weight_decay": 0.01, "clip_grad": 1.0,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "seed": 1234, "init_method_std": 0.02,
        "attention_dropout": 0.1, "hidden_dropout": 0.1, "norm_epsilon": 1e-5, "rotary_base": 10000,
        "split": "969,30,1", "eval_interval": 1000, "eval_iters": 100, "log_interval": 100,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "distributed_timeout_minutes": 10,
        "position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "num_workers": 2,
        "dataloader_type": "single", "bf16": False, "global_batch_size": None,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("dropped", [name for name in REQUIRED if name.startswith("--") and name != "--train-iters"])
def test_a_required_flag_that_is_missing_is_named(dropped):
    at = REQUIRED.index(dropped)
    with pytest.raises(ValueError, match=f"required: {dropped}$"):
        parse_arguments(REQUIRED[:at] + REQUIRED[at + 2 :])


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ([], None),
        (["--zero-bubble"], "auto"),
        (["--enable-zero-bubble"], "auto"),
        (["--zero-bubble-v-schedule"], "zb-v"),
        (["--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup", "half"], "v-half"),
        (["--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup", "zb"], "zb-v"),
        (["--zero-bubble-schedule", "zb-h2"], "zb-h2"),
        (["--zero-bubble", "--zero-bubble-schedule", "1f1b"], "1f1b"),
    ],
)
def test_naming_a_schedule_switches_zero_bubble_on(flags, schedule):
    assert JobFlags.of(parse_arguments([*REQUIRED, *flags])).schedule == schedule


def test_data_parallel_size_is_what_the_model_leaves():
    args = parse_arguments([*REQUIRED, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"])
    args = replace(args, world_size=24)
    assert args.data_parallel_size == 3


@pytest.mark.parametrize("flag", ["--async-save", "--ckpt-step=2", "--num-layer=4"])
def test_an_unknown_flag_is_named_with_the_places_where_flags_are_listed(flag):
    with pytest.raises(ValueError, match=rf"^unrecognized arguments: {flag}; train.py --help .*own Megatron-LM \S+$"):
        parse_arguments([*REQUIRED, flag], "train.py")


def test_what_the_environment_adds_is_no_flag():
    args = parse_arguments(REQUIRED)
    assert isinstance(args, Arguments)
    assert (args.rank, args.world_size, args.local_rank) == (0, 1, 0)
    with pytest.raises(ValueError, match="unrecognized"):
        parse_arguments([*REQUIRED, "--rank", "1"])
