"""Defines the forward step that megatron-core's schedules call, and the loss function of the model's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.mcore.finite import spoil_if_infinite
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.data import get_batch

DataIterator = Iterator[dict[str, torch.Tensor]] | None


def loss_func(
    loss_mask: torch.Tensor | None, output: torch.Tensor, *, checks_finite: bool = False
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of the tokens that `loss_mask` selects, the number of these tokens, and a report to log.

    Args:
        loss_mask: [batch, sequence], 1.0 where a token counts for the loss.
        output: [batch, sequence], the loss of each token.
        checks_finite: whether an infinite loss makes the gradients NaN, so that all ranks detect the infinite loss.
    """
    assert loss_mask is not None, "a stage without a loss mask computes a loss"
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return spoil_if_infinite(loss) if checks_finite else loss, num_tokens, {"lm loss": report}


def make_forward_step(args: Arguments) -> Callable[..., Any]:
    """Make the forward step that megatron-core's schedules call for each microbatch and model chunk."""

    def forward_step(data_iterator: DataIterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        predicts_further = get_attr_wrapped_model(model, "mtp_process")
        batch = get_batch(
            data_iterator,
            args,
            embeds=get_attr_wrapped_model(model, "pre_process") or predicts_further,
            is_last=get_attr_wrapped_model(model, "post_process"),
        )
        further = {"loss_mask": batch.loss_mask} if predicts_further else {}
        output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels, **further)
        return output, partial(loss_func, batch.loss_mask, checks_finite=args.checks_finite)

    return forward_step


def losses_of(reports: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the summed loss of each microbatch; an empty list on a rank without the last stage."""
    return [report["lm loss"][0] for report in reports]


def mean_loss(reports: list[dict[str, torch.Tensor]], group: dist.ProcessGroup) -> float | None:
    """Return the mean loss per token over all ranks in `group`; None on a rank without the last stage."""
    if not reports:
        return None
    total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    dist.all_reduce(total, group=group)
    return (total[0] / total[1]).item()
