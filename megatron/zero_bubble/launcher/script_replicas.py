"""Hierarchical SGD for a script that calls `optimizer.step()` itself, and the waits of its replicas.

Megatron-LM reduces each iteration's loss over all replicas, for which each would wait in every iteration. Here it gets
this replica's own loss, which it does not reduce, and the sums behind a log line are reduced before that is printed.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.launcher.hooks import Call, Hook
from megatron.zero_bubble.session.hierarchy_flags import FLAG
from megatron.zero_bubble.session.reports import print_rank_0, wait_fields
from megatron.zero_bubble.session.session import Session


class ScriptReplicas:
    """The replicas of a script's model; it does nothing with a single one."""

    def __init__(self, script: Namespace, session: Session) -> None:
        self._script = script
        self._session = session
        self._averages = session.job.hierarchy is not None
        if not self._averages:
            return
        if getattr(script, "rerun_mode", "disabled") != "disabled":
            print_rank_0(
                f" > {FLAG}: with --rerun-mode {script.rerun_mode} all ranks wait for each other in every iteration; "
                "--rerun-mode disabled avoids that"
            )

    @property
    def is_local(self) -> bool:
        """Whether the next step is taken on this replica's own gradients."""
        return self._session.replicas.is_local

    def own_losses(self, losses: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the mean of the losses of all microbatches, in a form that Megatron-LM does not reduce over replicas.

        Args:
            losses: for each microbatch sums of losses and numbers of tokens, by name; empty without the last stage.
        """
        if not losses:
            return losses
        return [{name: _own_mean([each[name] for each in losses]) for name in losses[0]}]

    def after_step(self, iteration: int) -> None:
        """Average what is due after the step of `iteration`."""
        if self._session.replicas.changes_after(iteration):
            self._session.settle()
        self._session.replicas.after_step(iteration)

    def average_first(self, call: Call) -> Any:
        """Hook around an evaluation: give all replicas the same parameters first."""
        if self._session.has_started:
            self._session.average_all(call["iteration"])
        return call.proceed()

    def average_before_saving(self) -> None:
        """Give all replicas the same parameters and state of the optimizer."""
        if self._averages and self._session.has_started:
            self._session.average_all(self._script.curr_iteration + 1, with_states=True)

    def average_logged_losses(self, call: Call) -> Any:
        """Hook around Megatron-LM's log line: reduce this replica's sums of losses first, if a line is printed."""
        is_printed = call["iteration"] % self._script.log_interval == 0 or call.get("is_first_iteration")
        if self.is_local and is_printed and call["loss_dict"]:
            sums, names = call["total_loss_dict"], list(call["loss_dict"])
            call["loss_dict"] = {name: _mean_over_replicas(call["loss_dict"][name]) for name in names}
            for name in names:
                if name in sums:
                    sums[name] = _mean_over_replicas(sums[name])
        return call.proceed()

    def log_fields(self) -> str:
        """The waits of the replicas for a log line; a collective call."""
        return wait_fields(self._session.replicas.take_waits())


def _own_mean(reports: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a replica's mean of a loss over microbatches, which are pairs of a sum and a number of tokens."""
    if reports[0].numel() != 2:
        return torch.stack([report.reshape(-1) for report in reports]).mean(dim=0)
    total = torch.stack([report.reshape(-1) for report in reports]).sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return (total[0] / total[1]).reshape(1)


def _mean_over_replicas(value: torch.Tensor) -> torch.Tensor:
    group = parallel_state.get_data_parallel_group()
    mean = value.clone() / group.size()
    dist.all_reduce(mean, group=group)
    return mean


def replica_hooks(replicas: Callable[[], ScriptReplicas]) -> Iterator[Hook]:
    """The hooks that only `--hierarchical-sgd` needs."""
    training = "megatron.training.training"
    yield Hook(
        training,
        "training_log",
        ("loss_dict", "total_loss_dict", "iteration"),
        "takes the mean of the losses over replicas before a line is printed, no longer in every iteration",
        lambda call: replicas().average_logged_losses(call),
    )
    yield Hook(
        training,
        "evaluate_and_print_results",
        ("iteration",),
        "averages all replicas before they are evaluated",
        lambda call: replicas().average_first(call),
    )
