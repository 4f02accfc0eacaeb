"""Compares W that waits with the fused backward, for one stage of Transformer Engine's layers; prints JSON.

python -O -m tests.engines.compared_gradients FLAGS ...

For each argument, the flags of a model, it prints the names of the parameters whose gradients differ, and the names of
those whose gradients are zero everywhere.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch

from tests.engines.engine_on_cpu import import_engine, use_local_attention_and_norms

NUM_STAGES, STAGE = 4, 1
JOB = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --vocab-size 120 "
JOB += "--pipeline-model-parallel-size 4 --train-iters 1 --lr 1e-4 --mock-data --bf16 --tokenizer-type NullTokenizer "
JOB += "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
JOB += "--transformer-impl transformer_engine "


def compare(flags: str) -> dict[str, list[str]]:
    from megatron.zero_bubble.cli.check.stage_run import NUM_MICROBATCHES, make_stage
    from megatron.zero_bubble.cli.trainings import complete_arguments, one_process, rank_model
    from megatron.zero_bubble.planner import generate
    from megatron.zero_bubble.runtime.communicator import Arrived, PendingReceive, TensorSpec
    from megatron.zero_bubble.runtime.executor import Executor
    from megatron.zero_bubble.runtime.made_up_neighbours import MadeUpNeighbours
    from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
    from megatron.zero_bubble.schedule import Placement, lower

    class Neighbours(MadeUpNeighbours):
        """Sends every schedule the same messages, whatever their order."""

        def __init__(self) -> None:
            self._received: Counter[int] = Counter()

        def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
            self._received[source] += 1
            generator = torch.Generator().manual_seed(1000 * source + self._received[source])
            return Arrived(spec.empty().normal_(std=0.1, generator=generator))

    args = complete_arguments((JOB + flags).split(), NUM_STAGES, "compared_gradients", has_cuda=True)
    placement, gradients = Placement("linear", NUM_STAGES), []
    with one_process(args):
        states = None
        for schedule, store in (("zb-2p", WeightGradStore()), ("1f1b", None)):
            chunks = rank_model(args, placement, STAGE, store)
            states = states or [chunk.state_dict() for chunk in chunks]
            for chunk, state in zip(chunks, states, strict=True):
                chunk.load_state_dict(state)
            order = lower(generate(schedule, NUM_STAGES, NUM_MICROBATCHES))
            stage = make_stage(args, placement, STAGE, chunks, torch.device("cpu"))
            Executor(order, STAGE, Neighbours(), store or WeightGradStore()).run(stage)
            stage.finish()
            parameters = [pair for chunk in chunks for pair in chunk.named_parameters()]
            assert all(parameter.grad is None for _, parameter in parameters)
            gradients.append({name: parameter.main_grad for name, parameter in parameters})
    ours, expected = gradients
    return {
        "different": [name for name in expected if not torch.equal(ours[name], expected[name])],
        "zero": [name for name, gradient in expected.items() if not gradient.any()],
    }


def main() -> None:
    from megatron.zero_bubble.mcore.cpu import substitute_cuda

    import_engine()
    substitute_cuda()
    use_local_attention_and_norms()
    print(json.dumps({flags: compare(flags) for flags in sys.argv[1:]}))


if __name__ == "__main__":
    main()
