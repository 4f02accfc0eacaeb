"""The small job whose units the tests count."""

from __future__ import annotations

from megatron.zero_bubble.cli.trainings import complete_training
from megatron.zero_bubble.trainer.arguments import Arguments

JOB = "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --vocab-size 300 "
JOB += "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 1 --lr 1e-4 --mock-data"
GROUPED = "--group-query-attention --num-query-groups 2"


def arguments(flags: str, world_size: int = 2, *, has_cuda: bool = True) -> Arguments:
    given = f"{JOB} {flags}".split()
    return complete_training(given, world_size, "test", has_cuda=has_cuda, for_this_machine=False)[0]
