"""Makes schedules of torch.distributed.pipelining callable like megatron-core's forward-backward functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_model_config
from torch.distributed.pipelining import PipelineStage

from benchmarks.emulation.peers import torch_schedule
from megatron.zero_bubble.mcore.placement import finalize_gradients
from megatron.zero_bubble.runtime.device import own_device
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data import Batch, get_batch


def compute_linear_layers_in_aten(chunks: Sequence[torch.nn.Module]) -> None:
    """Make every linear layer of megatron-core in `chunks` multiply with `torch.nn.functional.linear`.

    torch.distributed.pipelining splits a backward along the autograd graph. megatron-core's own autograd function
    computes both gradients at once, so that a split would compute each gradient twice.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module._forward_impl = MethodType(_linear, module)


def _linear(
    layer: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **unused: Any
) -> torch.Tensor:
    return torch.nn.functional.linear(input, weight, bias)


class TorchForwardBackward:
    """Runs a step under a schedule of torch.distributed.pipelining, with megatron-core's layers and DDP.

    An instance is called like megatron-core's forward-backward functions. Evaluation, data parallelism and tensor
    parallelism are not supported.

    Args:
        name: name of the schedule in torch.distributed.pipelining.
        chunks: this rank's model chunks, wrapped in megatron-core's DDP.
        placement: the placement that the schedule prescribes.

    Raises:
        ValueError: the schedule refuses the number of microbatches.
    """

    def __init__(
        self,
        name: str,
        chunks: Sequence[Any],
        placement: Placement,
        rank: int,
        args: Arguments,
    ) -> None:
        assert args.global_batch_size is not None
        num_microbatches = args.global_batch_size // args.micro_batch_size
        self._placement, self._args = placement, args
        self._losses: list[torch.Tensor] = []
        stages = [
            _Stage(chunk.module, placement.stage_of(rank, index), placement.num_stages)
            for index, chunk in enumerate(chunks)
        ]
        self._has_first = [stage.is_first for stage in stages]
        self._has_last = [stage.is_last for stage in stages]
        pipeline_stages = [stage.for_pipelining(args, get_model_config(chunks[0])) for stage in stages]
        self._num_microbatches = num_microbatches
        self._schedule = torch_schedule(name, pipeline_stages, num_microbatches, self._loss)

    def __call__(
        self, *, data_iterator: Sequence[Any], model: Sequence[Any], num_microbatches: int, **unused: Any
    ) -> list[dict[str, torch.Tensor]]:
        """Run one step; return, for each microbatch, the dictionary that the training loop's loss function returns."""
        assert num_microbatches == self._num_microbatches
        inputs, labels = self._data(data_iterator)
        self._losses = []
        options = {} if labels is None else {"labels": labels}
        # The last stage computes its own loss; a target is passed because the runtime requires one.
        self._schedule.step(*inputs, target=labels, return_outputs=False, **options)
        _collect_gradients(model)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        finalize_gradients(get_model_config(model[0]), self._placement, list(model), None, groups, False)
        return [{"lm loss": torch.stack([loss.sum(), loss.new_tensor(loss.numel())])} for loss in self._losses]

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return a microbatch's loss, scaled so that the sum over microbatches is the mean loss."""
        self._losses.append(output.detach().float())
        return output.float().mean() / self._num_microbatches

    def _data(self, iterators: Sequence[Any]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return the data of all microbatches: tokens on the first stage's rank, labels on the last stage's rank."""
        tokens: list[Any] = []
        labels: list[Any] = []
        for iterator, is_first, is_last in zip(iterators, self._has_first, self._has_last, strict=True):
            batches = [self._batch(iterator, is_first, is_last) for _ in range(self._num_microbatches)]
            tokens += [batch.tokens for batch in batches if is_first]
            labels += [batch.labels for batch in batches if is_last]
        return ((torch.cat(tokens),) if tokens else ()), (torch.cat(labels) if labels else None)

    def _batch(self, iterator: Any, is_first: bool, is_last: bool) -> Batch:
        return get_batch(iterator, self._args, embeds=is_first, is_last=is_last)


class _Stage(torch.nn.Module):
    """One stage of the model as torch.distributed.pipelining calls it.

    The input is tokens for the first stage and activations for others; the output is losses for the last stage and
    activations for others.
    """

    def __init__(self, model: torch.nn.Module, stage: int, num_stages: int) -> None:
        super().__init__()
        self._model = model
        self._stage, self._num_stages = stage, num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        unwrapped: Any = model
        while hasattr(unwrapped, "module"):
            unwrapped = unwrapped.module
        self._set_input: Callable[[torch.Tensor], None] = unwrapped.set_input_tensor

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        tokens = x if self.is_first else None
        if not self.is_first:
            self._set_input(x)
        positions = torch.arange(x.shape[1], device=x.device).expand_as(x) if self.is_first else None
        output: torch.Tensor = self._model(tokens, positions, None, labels=labels if self.is_last else None)
        return output

    def for_pipelining(self, args: Arguments, config: Any) -> PipelineStage:
        """Return a `PipelineStage` with given shapes, so that the runtime need not run the stage to find the shapes."""
        device = own_device()
        batch, sequence = args.micro_batch_size, args.seq_length
        tokens = torch.zeros(batch, sequence, dtype=torch.int64, device=device)
        hidden = torch.zeros(sequence, batch, args.hidden_size, dtype=config.pipeline_dtype, device=device)
        losses = torch.zeros(batch, sequence, dtype=torch.float32, device=device)
        return PipelineStage(
            self,
            self._stage,
            self._num_stages,
            device,
            input_args=tokens if self.is_first else hidden.clone().requires_grad_(),
            output_args=(losses if self.is_last else hidden).requires_grad_(),
        )


def _collect_gradients(model: Sequence[Any]) -> None:
    """Add the gradients that W of torch.distributed.pipelining leaves in `grad` to `main_grad`.

    megatron-core's hooks do not see these gradients.
    """
    for chunk in model:
        for parameter in chunk.parameters():
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None
