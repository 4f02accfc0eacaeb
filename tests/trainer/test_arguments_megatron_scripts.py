"""The flags of Megatron-LM's own example scripts, as facts, at their own sizes, as an estimate takes them.

They are those of the examples of release core_v0.16.1: `examples/gpt3/train_gpt3_175b_distributed.sh`,
`examples/llama/train_llama3_8b_h100_fp8.sh` and `examples/mixtral/train_mixtral_8x7b_distributed.sh`.
`test_numerics.py` trains models of these kinds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.session.settings import JobSettings
from megatron.zero_bubble.trainer.arguments import Arguments, parse_arguments
from megatron.zero_bubble.trainer.checkpoint import unloadable
from megatron.zero_bubble.trainer.checks import complete_and_check

GPT3 = """
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
--fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path DATA --vocab-file VOCAB
--merge-file MERGES --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000
--save CHECKPOINTS --load CHECKPOINTS --eval-iters 10 --tensorboard-dir LOGS
"""
LLAMA3 = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
--hidden-dropout 0.0 --swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused
--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
--lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
--clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer
--vocab-size 128256 --data-cache-path CACHE --tiktoken-pattern v2 --split '99,1,0'
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
--eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
--ckpt-format torch_dist --distributed-timeout-minutes 60 --save CHECKPOINTS --load CHECKPOINTS
--tensorboard-dir LOGS --pipeline-model-parallel-size 4
"""
"""With a pipeline, which this script leaves to the user."""
FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather"
MIXTRAL = """
--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --tokenizer-type HuggingFaceTokenizer
--tokenizer-model TOKENIZER --data-path DATA --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4
--train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1
--lr-warmup-iters 500 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
--expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000
--eval-interval 1000 --eval-iters 10 --save CHECKPOINTS --load CHECKPOINTS --tensorboard-dir LOGS --no-load-optim
--no-load-rng --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B
"""
SMALL_GPT3 = GPT3.replace(
    "--tensor-model-parallel-size 8 --pipeline", "--tensor-model-parallel-size 1 --pipeline"
).replace("parallel-size 16", "parallel-size 2")
"""On so few ranks that the schedules for the 96 sizes of its batch are planned within a second."""


def started(script: str, world_size: int, has_cuda: bool = True) -> tuple[Arguments, JobSettings]:
    """The flags of a script with `--zero-bubble` at its end, on `world_size` ranks."""
    parsed = parse_arguments([*script.split(), "--train-iters", "1000", "--zero-bubble"], ignores_megatrons=True)
    return complete_and_check(parsed, {"WORLD_SIZE": str(world_size)}, has_cuda, for_this_machine=False)


@pytest.mark.parametrize(
    ("script", "world_size"),
    [
        pytest.param(SMALL_GPT3, 32, id="gpt3"),
        pytest.param(GPT3, 1024, id="gpt3-whole", marks=pytest.mark.exhaustive),  # plans for a minute
        pytest.param(LLAMA3, 8, id="llama3"),
        pytest.param(f"{LLAMA3} {FP8} --transformer-impl transformer_engine", 8, id="llama3-fp8"),
        pytest.param(MIXTRAL, 32, id="mixtral"),
    ],
)
def test_the_script_starts_a_zero_bubble_job(script: str, world_size: int) -> None:
    args, job = started(script, world_size)
    assert job.plan is not None
    assert job.plan.name == "auto"
    # GPT-3's script leaves its kind to its files.
    assert ("--tokenizer-type" in script) or args.tokenizer_type == "GPT2BPETokenizer"


def test_a_script_in_fp8_is_told_that_its_checkpoints_cannot_be_loaded() -> None:
    assert unloadable(started(LLAMA3, 8)[0]) is None
    args = started(f"{LLAMA3} {FP8} --transformer-impl transformer_engine", 8)[0]
    assert str(unloadable(args)).startswith(" > --fp8-format hybrid with --save: this trainer loads no checkpoint")
    assert unloadable(replace(args, save=None)) is None


def test_sequence_parallelism_over_one_rank_is_none() -> None:
    assert not started(LLAMA3, 8)[0].sequence_parallel
    assert not started(MIXTRAL, 32)[0].sequence_parallel


def test_a_cpu_refuses_what_only_a_gpu_can_do() -> None:
    with pytest.raises(ValueError, match=r"^--fp8-format hybrid needs a GPU"):
        started(f"{LLAMA3} {FP8}", 8, has_cuda=False)
    started(LLAMA3, 8, has_cuda=False)
    with pytest.raises(ValueError, match=r"^--moe-grouped-gemm needs CUDA"):
        started(MIXTRAL, 32, has_cuda=False)
    started(MIXTRAL.replace("--moe-grouped-gemm", ""), 32, has_cuda=False)


def test_a_first_start_of_a_script_that_resumes_itself_begins_anew(tmp_path: Path) -> None:
    from megatron.zero_bubble.trainer.pretrain import without_first_load

    flags = LLAMA3.replace("CHECKPOINTS", str(tmp_path))
    args = started(flags, 8)[0]
    assert without_first_load(args).load is None
    assert without_first_load(replace(args, load=f"{tmp_path}/.")).load is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert without_first_load(args).load == str(tmp_path)
    elsewhere = started(flags.replace(f"--save {tmp_path}", "--save other"), 8)[0]
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert without_first_load(elsewhere).load == str(tmp_path)


@pytest.mark.parametrize(
    ("script", "flag"), [(GPT3, "--tensorboard-dir"), (LLAMA3, "--train-samples"), (MIXTRAL, "--tensorboard-dir")]
)
def test_the_trainer_refuses_flags_that_it_leaves_to_megatron(script: str, flag: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{flag}: pretrain_gpt.py does not support this flag: leave it out, or train with"
    ):
        parse_arguments([*script.split(), "--zero-bubble"])
