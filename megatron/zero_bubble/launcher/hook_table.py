"""Makes the launcher's hooks, and holds the state that the hooks share until the script ends."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.config_deferral import ConfigDeferral
from megatron.zero_bubble.launcher.hooks import Call, Hook, Needed
from megatron.zero_bubble.launcher.loop_run import LoopRun
from megatron.zero_bubble.launcher.run import Run
from megatron.zero_bubble.launcher.script_checkpoint import load_arguments, writes_in_threads
from megatron.zero_bubble.launcher.script_choice import refuse_restarts, validate_arguments
from megatron.zero_bubble.launcher.script_steps import needed_for_post_validation
from megatron.zero_bubble.session.start_up import SessionError

_MODELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("megatron.core.models.gpt.gpt_model:GPTModel", ", vp_stage", {}),
    ("megatron.core.models.mamba.mamba_model:MambaModel", "", {"until": "0.17"}),
    ("megatron.core.models.hybrid.hybrid_model:HybridModel", ", vp_stage, hybrid_layer_pattern", {"since": "0.18"}),
)
"""Model classes, each with further parameters of its constructor, and the first or last version that has the class."""
_PATTERNS: tuple[tuple[str, dict[str, str]], ...] = (
    ("megatron.core.ssm.mamba_hybrid_layer_allocation", {"since": "0.17", "until": "0.17"}),
    ("megatron.core.models.hybrid.hybrid_layer_allocation", {"since": "0.18"}),
)
"""Modules that cut a hybrid model's layer pattern into stages, each with the first or last version that has it."""
_LAYING_OUT = ("distrib_optimizer:DistributedOptimizer", "layer_wise_optimizer:LayerWiseDistributedOptimizer")
"""Optimizer classes that compute the position of each parameter in DDP's buffers."""


class ScriptHooks:
    """Makes the launcher's hooks; holds a `Run` for Megatron-LM's trainer or a `LoopRun` for another training loop."""

    def __init__(self, flags: LaunchFlags, unimported: ImportError | None = None) -> None:
        self.flags, self._unimported = flags, unimported
        self._run: Run | LoopRun | None = None
        self._data_provider: Callable[..., Any] | None = None
        """The script's function that makes the datasets; None before Megatron-LM's `pretrain` is called."""
        self._timeout_minutes: int | None = None
        """Timeout of the process groups of a loop of its own; None before the loop makes them."""
        self._changes = ExitStack()
        """Undoes changes of megatron-core's classes and of the script's configurations."""
        self._deferral = ConfigDeferral()
        self._changes.callback(self._deferral.end)

    def hooks(self) -> Iterator[Hook]:
        """Yield the hooks that a schedule needs, in the order in which a script calls the hooked functions."""
        yield from self._layout_hooks()
        yield from self._model_hooks()
        yield from self._step_hooks()
        if self.flags.zero_bubble_post_validation or self.flags.hierarchical_sgd is not None:
            yield from self._optimizer_hooks()
        if self.flags.zero_bubble_post_validation:
            yield from self._post_validation_hooks()
        if self.flags.hierarchical_sgd is not None:
            yield from self._replica_hooks()

    def _layout_hooks(self) -> Iterator[Hook]:
        """Yield the hooks that choose the layout of the model, and give this layout to the model's configuration."""
        yield Hook(
            "megatron.training.inprocess_restart:inprocess_restart(args)",
            "refuses restarts within the process, before a refusal could itself be restarted",
            refuse_restarts,
        )
        yield Hook(
            "megatron.training.training:pretrain(train_valid_test_dataset_provider)",
            "keeps the function that makes the datasets, whose parameters tell whether a rank may have several chunks",
            self._keep_data_provider,
        )
        yield Hook(
            "megatron.training.checkpointing:load_args_from_checkpoint(args, load_arg)",
            "reads a checkpoint's arguments; gives the script a layer pattern without the stages of a chosen layout",
            load_arguments,
        )
        yield Hook(
            "megatron.training.arguments:validate_args(args)",
            "refuses unsupported settings; allows uneven stages if zero bubble chooses the layout or padding is set",
            partial(validate_arguments, self.flags),
        )
        yield Hook(
            "megatron.core.parallel_state:initialize_model_parallel"
            "(pipeline_model_parallel_size, virtual_pipeline_model_parallel_size, distributed_timeout_minutes, "
            "get_embedding_ranks)",
            "chooses and checks the schedule, when the script's arguments are complete and nothing is built yet",
            self._begin,
        )
        yield Hook(
            "megatron.training.training:setup_model_and_optimizer(model_provider_func)",
            "chooses the layout under `--zero-bubble`, before the script builds its model",
            partial(self._in_script, Run.set_up_model),
        )
        yield Hook(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__()",
            "gives the configuration the layers of each stage, for a V placement and for a chosen layout",
            self._configure_new,
        )
        for function in (
            "transformer_block:get_num_layers_to_build",
            "multi_token_prediction:get_mtp_num_layers_to_build",
        ):
            yield Hook(
                f"megatron.core.transformer.{function}(config)",
                "gives the layers of each stage to a configuration that was made before the process groups",
                partial(self._in_script, lambda run, call: run.stages.configure_old(call)),
            )

    def _model_hooks(self) -> Iterator[Hook]:
        """Yield the hooks by which a script builds the model stages of the chosen layout."""
        yield Hook(
            "megatron.core.transformer.module:MegatronModule.__init__(config)",
            "makes Transformer Engine's modules defer W in models of every class",
            self._deferral.begin_module,
        )
        for model, more, versions in _MODELS:
            yield Hook(
                f"{model}.__init__(config, pre_process, post_process, pg_collection{more})",
                "checks the configuration; gives a chunk the layers, the embedding and the loss of its stage",
                lambda call: self.run.build_chunk(call),
                **versions,
            )
        for module, versions in _PATTERNS:
            yield Hook(
                f"{module}:select_pipeline_segment(main_pattern, vp_stage)",
                "returns the layers of a stage, in a V too; a layer pattern lists the stages in model order",
                partial(self._in_script, Run.select_layers),
                **versions,
            )
        for name, handle in (
            ("first", lambda run, call: run.stages.is_stage(call, 0)),
            ("last", lambda run, call: run.stages.is_stage(call, -1)),
        ):
            yield Hook(
                f"megatron.core.parallel_state:is_pipeline_{name}_stage(ignore_virtual, vp_stage)",
                f"returns true on rank 0 for the {name} stage of a V; scripts read data where this function is true",
                partial(self._in_script, handle),
            )
        yield Hook(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"
            "(config, module, ddp_config)",
            "splits linear layers before DDP wraps them, so that W calls the hook with which DDP reduces gradients",
            self._deferral.ended_after(lambda call: self.run.wrap_in_ddp(call)),
        )
        for optimizer in _LAYING_OUT:
            yield Hook(
                f"megatron.core.optimizer.{optimizer}.compute_full_param_layout(params)",
                "spreads the vocabulary before a chunk's parameters are laid out in DDP's buffers",
                lambda call: self.run.lay_out_parameters(call),
                since="0.18",
            )

    def _step_hooks(self) -> Iterator[Hook]:
        """Yield the hooks that run a training step, extend the training log line, and print a summary at the end."""
        yield Hook(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func()",
            "returns a function that runs the zero-bubble schedule",
            self._deferral.ended_after(lambda call: self.run.forward_backward_func(call)),
        )
        yield Hook(
            "megatron.core.pipeline_parallel.schedules:forward_step(model)",
            "refuses a loop that trains with a function which it took before `enable()`",
            self._forward_step,
        )
        yield Hook(
            "megatron.training.utils:print_rank_last(message)",
            "adds the idle share to the training log line",
            partial(self._in_script, Run.extend_log_line),
        )
        yield Hook(
            "megatron.training.training:train()",
            "prints a summary of the iterations after the training loop has ended",
            partial(self._in_script, Run.train),
        )

    def _optimizer_hooks(self) -> Iterator[Hook]:
        """Yield the hooks that post-validation and hierarchical SGD share."""
        single = "the optimizer for post-validation and for the averaging of replicas"
        chain = "the chain of Muon and the optimizer of `get_megatron_optimizer`"
        for function, optimizer in ((":get_megatron_optimizer", single), (".muon:get_megatron_muon_optimizer", chain)):
            path = f"megatron.core.optimizer{function}()"
            yield Hook(path, f"keeps {optimizer}", partial(self._in_script, Run.keep_optimizer))
        yield Hook(
            "megatron.core.optimizer.optimizer:ChainedOptimizer.step(self)",
            "reports the schedule's step; validates the step if its gradient norm is logged; then averages replicas",
            partial(self._in_script, Run.step),
        )
        yield Hook(
            "megatron.training.checkpointing:save_checkpoint()",
            "validates the last step and averages replicas before a checkpoint is saved",
            partial(self._in_script, Run.save),
        )

    def _post_validation_hooks(self) -> Iterator[Hook]:
        """Yield the hooks that only `--zero-bubble-post-validation` needs."""
        deferred = "zeroes gradients only after the step that used them is validated"
        for path in (
            "optimizer.optimizer:ChainedOptimizer.zero_grad",
            "distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
        ):
            yield Hook(f"megatron.core.{path}(self)", deferred, partial(self._in_script, Run.zero_gradients))
        own = "returns the rank's own value, which is equal on all ranks, so that no rank waits after a step"
        reductions: tuple[tuple[str, str, Callable[[Run, Call], Any]], ...] = (
            ("logical_and", "input", lambda run, call: run.agreed(call["input"], call)),
            ("reduce_max_stat", "stat", lambda run, call: run.agreed(call["stat"], call)),
        )
        for name, parameter, agreed in reductions:
            path = f"megatron.training.utils:{name}_across_model_parallel_group({parameter})"
            yield Hook(path, own, partial(self._in_script, agreed))

    def _replica_hooks(self) -> Iterator[Hook]:
        """Yield the hooks that only `--hierarchical-sgd` needs."""
        yield Hook(
            "megatron.training.training:training_log(loss_dict, total_loss_dict, iteration)",
            "averages the losses over replicas before they are printed or recorded, and not in every iteration",
            partial(self._in_script, lambda run, call: run.replicas.average_logged_losses(call)),
        )
        yield Hook(
            "megatron.training.training:evaluate_and_print_results(iteration)",
            "averages the parameters of all replicas before an evaluation",
            partial(self._in_script, lambda run, call: run.replicas.average_first(call)),
        )

    def needed(self) -> Iterator[Needed]:
        """Yield the functions of megatron-core and Megatron-LM that the launcher relies on but does not replace."""
        if self.flags.zero_bubble_post_validation:
            yield from needed_for_post_validation()
        yield Needed(
            "megatron.core.tensor_parallel.random:CheckpointFunction.forward"
            "(run_function, distribute_saved_activations)",
            "runs a block of layers and keeps only the block's input; R runs the block again before its backward",
        )
        yield Needed(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__"
            "(config, layer_number, pg_collection, vp_stage)",
            "builds a layer; `--zero-bubble-seed-by-layer` sets the layer's seed first",
        )
        yield Needed(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__(layer_number)",
            "builds a layer of multi-token prediction; `--zero-bubble-seed-by-layer` sets its seed first",
        )
        yield Needed(
            "megatron.core.pipeline_parallel.schedules:set_current_microbatch(model, microbatch_id)",
            "sets a layer's microbatch number, from which the seed of the layer's dropout follows",
        )

    @property
    def run(self) -> Run | LoopRun:
        """The `Run` of a script with Megatron-LM's training loop, or the `LoopRun` of a script with another loop.

        Raises:
            SessionError: Megatron-LM's trainer made its process groups before zero bubble was enabled.
        """
        if self._run is None:
            if _script_arguments() is not None:
                raise SessionError("megatron-core's process groups exist already: call enable() before they are made")
            self._run = LoopRun(self.flags, self._timeout_minutes)
        return self._run

    def _keep_data_provider(self, call: Call) -> Any:
        self._data_provider = call["train_valid_test_dataset_provider"]
        return call.proceed()

    def _begin(self, call: Call) -> Any:
        script = _script_arguments()
        if script is None:
            self._timeout_minutes = call["distributed_timeout_minutes"]
            return call.proceed()
        if self._unimported is not None:
            raise SessionError(f"megatron.training could not be imported when the job began: {self._unimported}")
        self._run = run = Run(script, self.flags, self._data_provider)
        self._changes.enter_context(writes_in_threads(script))
        return run.begin(call)

    def _configure_new(self, call: Call) -> None:
        with self._deferral.switched_off_in_copy(call["self"]):
            self._in_script(lambda run, call: run.stages.configure_new(call), call)

    def _forward_step(self, call: Call) -> Any:
        return self._run.forward_step(call) if isinstance(self._run, LoopRun) else call.proceed()

    def _in_script(self, handle: Callable[[Run, Call], Any], call: Call) -> Any:
        """Pass a call to `handle` if Megatron-LM's trainer runs; under another loop, call the original function."""
        return handle(self._run, call) if isinstance(self._run, Run) else call.proceed()

    def check_trained(self) -> None:
        """Check at the script's end that the schedule was used.

        Raises:
            SessionError: no training step ran under the zero-bubble schedule, although the script had iterations to
                train.
        """
        run = self._run
        if run is None or not (run.had_nothing_to_train or any(session.num_steps for session in run.sessions)):
            raise SessionError(
                "the script ended without a training step through megatron-core's get_forward_backward_func: "
                "the schedule had no effect"
            )

    def close(self) -> None:
        """Close all sessions, in reverse order because they replace the same functions, and undo other changes."""
        for session in () if self._run is None else self._run.sessions:
            self._changes.callback(session.close)
        self._changes.close()


def _script_arguments() -> Namespace | None:
    """Return the arguments of Megatron-LM's trainer; None if another training loop runs or no arguments exist yet."""
    if "megatron.training.global_vars" not in sys.modules:
        return None
    from megatron.training.global_vars import get_args

    try:
        return get_args()
    except AssertionError:  # Megatron-LM's arguments do not exist yet.
        return None
