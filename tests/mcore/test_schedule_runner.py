"""A step that fails leaves nothing behind for the next step; a warm-up computes only what nothing records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron.zero_bubble.cli.trainings import complete_arguments, one_process, rank_model
from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.forward_step import make_forward_step
from tests.launch import TINY_GPT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, for which megatron-core is adapted")

MICROBATCHES = 4


@pytest.fixture
def args() -> Iterator[Arguments]:
    flags = ("--attention-dropout", "0", "--hidden-dropout", "0", "--global-batch-size", str(MICROBATCHES))
    args = complete_arguments([*TINY_GPT, *flags], 1, "test", has_cuda=False)
    with torch.compiler.set_stance("force_eager"), one_process(args):
        yield args


def microbatches(args: Arguments) -> Iterator[dict[str, torch.Tensor]]:
    shape, generator = (args.micro_batch_size, args.seq_length), torch.Generator().manual_seed(5)
    for _ in range(MICROBATCHES):
        tokens, labels = (torch.randint(args.padded_vocab_size, shape, generator=generator) for _ in range(2))
        positions = torch.arange(args.seq_length).expand(shape).contiguous()
        yield {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(shape), "position_ids": positions}


def gradients(
    args: Arguments, run: ForwardBackward, chunk: Any, read: Callable[[Any], Any] = iter, data: Any = None
) -> list[torch.Tensor]:
    """Run a step with the microbatches in `data`; the forward step reads from the iterator that `read` returns."""
    forward_step = make_forward_step(args)
    chunk.zero_grad_buffer()
    run(
        forward_step_func=lambda source, model: forward_step(read(source), model),
        data_iterator=data or microbatches(args),
        model=chunk,
        num_microbatches=MICROBATCHES,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    return [parameter.main_grad.clone() for parameter in chunk.parameters()]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


@pytest.mark.parametrize("warms_up", [False, True], ids=["in the step", "in the warm-up"])
def test_the_step_after_a_failed_step_has_the_gradients_of_any_step(args: Arguments, warms_up: bool) -> None:
    plan, store = RunSchedules.named("zb-h1", 1), WeightGradStore()
    (chunk,) = rank_model(args, plan.placement, 0, store)
    chunk.config.no_sync_func = chunk.no_sync
    run = ForwardBackward(plan, store)
    expected = gradients(args, run, chunk)
    layer = chunk.module.decoder.layers[1]
    run.warms_up = warms_up
    hook = layer.register_forward_hook(lambda module, inputs, output: (Failing.apply(output[0]), *output[1:]))
    with pytest.raises(ZeroDivisionError) as failure:
        gradients(args, run, chunk)
    hook.remove()
    assert all(group.is_last_microbatch for group in chunk.bucket_groups), "the step has left DDP's no_sync"
    del failure  # which kept the frames of the step until here: their end would have left no_sync, too
    assert run.position() is None
    assert store.num_put == 0
    assert run.observer.take_mean().span > 0
    for _ in range(2):
        assert all(map(torch.equal, gradients(args, run, chunk), expected))
    run.close()


def test_a_step_with_iterators_for_other_chunks_is_refused_before_it_begins(args: Arguments) -> None:
    plan, store = RunSchedules.named("zb-h1", 1), WeightGradStore()
    (chunk,) = rank_model(args, plan.placement, 0, store)
    run = ForwardBackward(plan, store)
    with pytest.raises(ForwardStepError, match="data_iterator has 2 iterators for 1 model chunks: give one for each"):
        gradients(args, run, chunk, data=[microbatches(args), microbatches(args)])
    assert run.position() is None


def test_a_pipeline_of_several_ranks_takes_no_step_after_a_failed_step(args: Arguments) -> None:
    plan, store = RunSchedules.named("zb-h1", 1), WeightGradStore()
    (chunk,) = rank_model(args, plan.placement, 0, store)
    run = ForwardBackward(plan, store)
    run._has_lost_messages = True
    with pytest.raises(
        RuntimeError, match=r"^an earlier step failed, and its messages may arrive .*: restart the job$"
    ):
        gradients(args, run, chunk)


class Queue:
    """A data source that is no iterator, as in slime."""

    def __init__(self, args: Arguments) -> None:
        self.rest = microbatches(args)


@pytest.mark.parametrize(
    ("rehearses", "is_iterator", "more"), [(True, True, 1), (False, True, 0), (True, False, 0)], ids=str
)
def test_the_warm_up_computes_unless_forwards_are_recorded_or_data_is_read_once(
    args: Arguments, rehearses: bool, is_iterator: bool, more: int
) -> None:
    plan, store = RunSchedules.named("zb-h1", 1), WeightGradStore()
    (chunk,) = rank_model(args, plan.placement, 0, store)
    run, forwards = ForwardBackward(plan, store), []
    expected = gradients(args, run, chunk)
    chunk.register_forward_hook(lambda *_: forwards.append(True))
    run.warms_up, run.rehearses = True, rehearses
    source = () if is_iterator else (lambda queue: queue.rest, Queue(args))
    assert all(map(torch.equal, gradients(args, run, chunk, *source), expected))
    assert len(forwards) == MICROBATCHES + more
    run.close()
