"""Handles a script's calls of `optimizer.step()` under post-validation and hierarchical SGD.

Under post-validation the schedule has already taken the step when the script calls `optimizer.step()`. In most
iterations, the hooked `optimizer.step()` reports at once that the parameters were updated; with fp32 and bf16, this
report is always true. In the first and the last iteration, and in iterations that the script logs, the hooked
`optimizer.step()` first validates the step, and reports the outcome and the norm of the gradients. Gradients are zeroed
when the step is validated. Before the script saves a checkpoint or evaluates the model, the last optimizer step is
validated if it is not validated yet.

Megatron-LM reduces each iteration's loss over all replicas, and this reduction makes all replicas wait for each other.
Under hierarchical SGD, Megatron-LM gets this replica's own loss in a form that Megatron-LM does not reduce, so that
replicas do not wait for each other. Losses are averaged over the replicas before Megatron-LM prints or records them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.launcher.hooks import Call, Needed
from megatron.zero_bubble.launcher.script_settings import AT_OPTIMIZER_STEP, refuse_in_own_loop
from megatron.zero_bubble.mcore.post_validation import PostValidation, StepOutcome
from megatron.zero_bubble.session.features import HIERARCHICAL_SGD
from megatron.zero_bubble.session.reports import print_rank_0
from megatron.zero_bubble.session.session import Session


def iterations_done(script: Namespace, session: Session, *, trains: bool) -> int:
    """Return the number of iterations before this one; Megatron-LM may skip an iteration, or run it a second time.

    Args:
        trains: whether this iteration trains, rather than evaluates.

    Raises:
        SessionError: a loop other than Megatron-LM's trains, such as slime's, and a setting needs Megatron-LM's.
    """
    if not hasattr(script, "curr_iteration"):  # set by Megatron-LM's loop before its first training step
        if trains:
            refuse_in_own_loop(session.job.flags, AT_OPTIMIZER_STEP)
        return session.iteration
    return script.curr_iteration


class ScriptPostValidation:
    """Answers a script's calls of `optimizer.step()` with the outcomes of the steps that the schedule has taken.

    Args:
        post_validation: the `PostValidation` of the schedule.
        chunks: this rank's model chunks, wrapped in DDP.
    """

    def __init__(self, script: Namespace, post_validation: PostValidation, optimizer: Any, chunks: list[Any]) -> None:
        self._script, self._post_validation = script, post_validation
        self._optimizer, self._chunks = optimizer, chunks
        self._outcome = StepOutcome(was_updated=True, grad_norm=None)
        self._is_first = True
        """Whether no step has run yet; scripts always log the first iteration of a run."""
        post_validation.settled = self._settle_outcome

    def _settle_outcome(self, outcome: StepOutcome) -> None:
        self._outcome = outcome
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self) -> tuple[bool, float | None, float | None]:
        """Return the outcome of the step that the schedule has taken, in the form of megatron-core's optimizers."""
        is_first, self._is_first = self._is_first, False
        if not is_first and not self._is_logged():
            return True, None, None
        self._post_validation.validate()
        return self._outcome.was_updated, self._outcome.grad_norm, self._outcome.num_zeros

    def _is_logged(self) -> bool:
        """Return whether the script logs the gradient norm of this iteration, or the iteration is the last one."""
        script = self._script
        iteration = script.curr_iteration + 1
        is_printed = iteration % script.log_interval == 0
        return is_printed or _is_recorded(script, iteration) or iteration == script.train_iters


def needed_for_post_validation() -> Iterator[Needed]:
    """Yield the functions of megatron-core by which post-validation takes, checks and corrects an optimizer step."""
    gradients, group = "returns the gradients for the norm", "returns the ranks over which the norm is summed"
    again = "gives the model its old parameters after a step was undone"
    random = "saves and restores the random state, for forwards that run again"
    prepare, clip = "puts the gradients where the optimizer expects them", "clips the gradients by their norm"
    step = "takes a step without norm and clipping"
    norm = "megatron.core.optimizer.optimizer:MegatronOptimizer.{}_for_grad_norm()"
    yield Needed(norm.format("get_main_grads"), gradients, until="0.18")
    yield Needed(norm.format("get_grads"), gradients, since="0.19")
    for signature, reason in (
        ("optimizer.optimizer:MegatronOptimizer.get_grad_stats_parallel_group()", group),
        ("optimizer.optimizer:ChainedOptimizer.grads_states_parallel_group_is_shared()", group),
        ("optimizer.optimizer:MegatronOptimizer.prepare_grads()", prepare),
        ("optimizer.optimizer:ChainedOptimizer.step_with_ready_grads()", step),
        ("optimizer.clip_grads:clip_grad_by_total_norm_fp32(parameters, max_norm, total_norm)", clip),
        ("optimizer.optimizer:Float16OptimizerWithFloat16Params._copy_main_params_to_model_params()", again),
        ("optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params()", again),
        ("distributed.distributed_data_parallel:DistributedDataParallel.start_param_sync(force_sync)", again),
        ("tensor_parallel.random:_get_all_rng_states()", random),
        ("tensor_parallel.random:_set_all_rng_states()", random),
    ):
        yield Needed(f"megatron.core.{signature}", reason)


class ScriptReplicas:
    """Averages parameters and logged losses over the replicas of a script's model under hierarchical SGD."""

    def __init__(self, script: Namespace, session: Session) -> None:
        self._script = script
        self._session = session
        if session.job.hierarchy is not None and getattr(script, "rerun_mode", "disabled") != "disabled":
            print_rank_0(
                f" > {HIERARCHICAL_SGD}: with --rerun-mode {script.rerun_mode} all ranks wait for each other in every "
                "iteration; --rerun-mode disabled avoids that"
            )

    def own_losses(self, losses: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the mean losses of this replica in a form that Megatron-LM does not reduce over replicas.

        Args:
            losses: a dictionary for each microbatch, which maps the name of a loss to its mean, or to its sum and
                number of tokens; an empty list on a rank without the last stage.
        """
        if not losses:
            return losses
        return [{name: _own_mean([each[name] for each in losses]) for name in losses[0]}]

    def after_step(self, iteration: int) -> None:
        """If averaging is due after `iteration`, validate the last step and average the replicas' parameters."""
        if self._session.replicas.changes_after(iteration):
            self._session.settle()
        self._session.replicas.after_step(iteration)

    def average_first(self, call: Call) -> Any:
        """Give all replicas the same parameters before a call that evaluates the model."""
        if self._session.has_started:
            self._session.average_all(call["iteration"])
        return call.proceed()

    def average_logged_losses(self, call: Call) -> Any:
        """Average losses over replicas before a call that prints Megatron-LM's log line or records losses."""
        is_printed = call["iteration"] % self._script.log_interval == 0 or call.get("is_first_iteration")
        is_logged = is_printed or _is_recorded(self._script, call["iteration"])
        if self._session.replicas.is_local and is_logged and call["loss_dict"]:
            sums, names = call["total_loss_dict"], list(call["loss_dict"])
            call["loss_dict"] = {name: _mean_over_replicas(call["loss_dict"][name]) for name in names}
            for name in names:
                if is_printed and name in sums:
                    sums[name] = _mean_over_replicas(sums[name])
        return call.proceed()


def _is_recorded(script: Namespace, iteration: int) -> bool:
    """Return whether the script writes the losses and the norm of an iteration to TensorBoard or Weights & Biases."""
    writes = bool(getattr(script, "tensorboard_dir", None) or getattr(script, "wandb_project", None))
    return writes and iteration % script.tensorboard_log_interval == 0


def _own_mean(reports: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of a loss over this replica's microbatches; `reports` are means, or sums with token counts."""
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
