"""Runs a forward and a backward as one operation, layer by layer, with the schedule plans of megatron-core's models.

megatron-core uses schedule plans for `--overlap-moe-expert-parallel-comm`. A schedule plan cuts a forward and its
backward into nodes, such as the experts of a layer, and the exchanges of tokens before and after the experts. The
method `run` of a plan takes the schedule plans of a forward and of another microbatch's backward, and executes the
nodes of the two plans alternately. Computation runs on one CUDA stream, and exchanges between experts run on another
CUDA stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.pipeline_parallel import schedules as mcore
from megatron.core.pipeline_parallel.utils import ScheduleNode, set_streams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.mcore.plan_nodes import complete_plan
from megatron.zero_bubble.mcore.recorded_call import ForwardStepError, RecordedCall, record_call
from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.runtime.recorder import OpRecorder
from megatron.zero_bubble.schedule import Op

FLAG = "--overlap-moe-expert-parallel-comm"


def refuse_unpaired(config: Any, model_class: type[Any] | None = None) -> None:
    """Check that a model can run a forward and a backward as one operation.

    Raises:
        ValueError: the model has no schedule plans, or its schedule plans do not support a setting.
    """
    if model_class is not None and not hasattr(model_class, "build_schedule_plan"):
        raise ValueError(
            f"{FLAG} needs a model with build_schedule_plan, such as GPTModel, and not {model_class.__name__}"
        )
    refused = {
        "--expert-model-parallel-size 1": config.expert_model_parallel_size == 1,
        "--recompute-granularity full": config.recompute_granularity == "full",
        "--moe-shared-expert-overlap": config.moe_shared_expert_overlap,
        f"--mtp-num-layers {config.mtp_num_layers}": (config.mtp_num_layers or 0) > 1,
        "--mtp-num-layers and a last layer without experts (--moe-layer-freq)": bool(config.mtp_num_layers)
        and not _ends_with_experts(config),
        "--recompute-modules moe": config.recompute_granularity == "selective"
        and "moe" in (config.recompute_modules or ()),
        f"--moe-token-dispatcher-type {config.moe_token_dispatcher_type}": config.moe_token_dispatcher_type
        not in ("alltoall", "flex"),
        "--fp4-format": bool(getattr(config, "fp4", None))
        and not hasattr(TransformerLayerSchedulePlan, "get_low_precision_context"),
        "--experimental-attention-variant gated_delta_net": getattr(config, "experimental_attention_variant", None)
        == "gated_delta_net"
        and not hasattr(GatedDeltaNet, "backward_dw"),
        **{
            f"{name} of the model's configuration": getattr(config, name, False)
            for name in ("enable_mhc_connections", "enable_hyper_connections")
        },
    }
    for given, is_on in refused.items():
        if is_on:
            raise ValueError(f"{FLAG} does not work with {given}: change one of them")


def _ends_with_experts(config: Any) -> bool:
    """Whether the last layer, whose form layers of multi-token prediction have, is a layer of experts."""
    every = config.moe_layer_freq
    return bool(every[-1] if isinstance(every, Sequence) else (config.num_layers - 1) % every == 0)


def refuse_unplanned(call: RecordedCall, *, predicts_further: bool = False) -> None:
    """Check that schedule plans give the router the same tokens as the model's own forward.

    In its own forward, a layer of experts leaves out padding, and separates samples that were packed into one sequence.

    Args:
        predicts_further: whether the model has multi-token prediction, whose plans take no packed sequences.

    Raises:
        ForwardStepError: the model's own forward would give the router other tokens.
    """
    packed = call.keywords.get("packed_seq_params")
    length = getattr(packed, "tokens_per_sample", None)
    is_given = {
        "a padding_mask": call.keywords.get("padding_mask") is not None,
        "several samples in one packed sequence": length is not None
        and call.tokens is not None
        and call.tokens.numel() > length,
        "a packed sequence with --mtp-num-layers": predicts_further and packed is not None,
    }
    for given, is_on in is_given.items():
        if is_on:
            raise ForwardStepError(
                f"{FLAG} does not support {given} in the forward step, which megatron-core's schedule plans ignore or "
                "refuse: leave out the flag"
            )


class _KeptPlan(NamedTuple):
    """The schedule plan of a microbatch's forward, kept for the microbatch's backward."""

    plan: Any
    loss: ScheduleNode | None
    """The node that computes the loss; None except on the last stage."""


class _Pass(NamedTuple):
    """The arguments of a microbatch's forward or backward; a forward has no `output_tensor` and no `output_grad`."""

    microbatch: int
    chunk: int
    input_tensor: torch.Tensor | None
    output_tensor: torch.Tensor | None = None
    output_grad: torch.Tensor | None = None


@dataclass
class PairedStage(MegatronStage):
    """A stage that runs forwards and backwards with megatron-core's schedule plans, singly or in pairs."""

    recorder: OpRecorder | None = None
    """Recorder that times the exchanges of tokens between experts; None if operations are not recorded."""
    _kept: dict[tuple[int, int], _KeptPlan] = field(default_factory=dict)
    """(chunk, microbatch) -> the schedule plan of the microbatch's forward, kept for the microbatch's backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # `high_priority_a2a_comm_stream` and the parameter `high_priority` exist from megatron-core 0.18 on.
        is_high = getattr(self.call.config, "high_priority_a2a_comm_stream", False)
        set_streams(**({"high_priority": True} if is_high else {}))

    def forward(self, microbatch: int, chunk: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        if self.call.forward_only:
            return super().forward(microbatch, chunk, input_tensor)
        output, _ = self._run(_Pass(microbatch, chunk, input_tensor), None)
        assert output is not None
        return output

    def backward(self, *arguments: Any, **named: Any) -> torch.Tensor | None:
        return self._run(None, _Pass(*arguments, **named))[1]

    def forward_backward(
        self,
        forward: Op,
        input_tensor: torch.Tensor | None,
        backward: Op,
        backward_input: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, input_grad = self._run(
            _Pass(forward.microbatch, forward.chunk, input_tensor),
            _Pass(backward.microbatch, backward.chunk, backward_input, output_tensor, output_grad),
        )
        assert output is not None
        return output, input_grad

    def _run(self, forward: _Pass | None, backward: _Pass | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run a forward, a backward or both; return the forward's output and the backward's input gradient."""
        config = self._config
        if forward is not None and config.timers is not None:
            config.timers("forward-compute", log_level=2).start()
        kept, gradient = self._gradient_of_output(backward) if backward is not None else (None, None)
        new, loss_function = self._new_plan(forward) if forward is not None else (None, None)
        delays_scaling = config.fp8 and config.fp8_recipe == Fp8Recipe.delayed
        with get_fp8_context(config) if delays_scaling else contextlib.nullcontext():
            plan: Any = new if new is not None else kept
            output = type(plan).run(new, kept, b_grad=gradient)
        if forward is not None:
            output = self._end_forward(forward, new, loss_function, output)
        input_tensor = backward.input_tensor if backward is not None else None
        return (output if forward is not None else None), (None if input_tensor is None else input_tensor.grad)

    def _new_plan(self, forward: _Pass) -> tuple[Any, Any]:
        """Return the schedule plan of a forward, and the loss function of the user's forward step."""
        microbatch, chunk, input_tensor, *_ = forward
        model = self.call.chunks[chunk]
        if self._is_first(microbatch) and hasattr(model, "set_is_first_microbatch"):
            cast(Any, model).set_is_first_microbatch()
        mcore.set_current_microbatch(model, microbatch)
        get_attr_wrapped_model(model, "set_input_tensor")([input_tensor])
        call = record_call(self.call.forward_step_func, self.data_iterators[chunk], model, FLAG)
        refuse_unplanned(call, predicts_further=bool(self._config.mtp_num_layers))
        planned = get_attr_wrapped_model(model, "build_schedule_plan", return_model_obj=True)
        # The `WeightGradStore`, and not the schedule plan, determines when W runs.
        with replaced(self._config, "delay_wgrad_compute", False):
            plan = planned.build_schedule_plan(*call.arguments, **call.keywords)
        complete_plan(planned, plan)
        if self.recorder is not None:
            self._time_exchanges(plan, self.recorder)
        return plan, call.loss_function

    @staticmethod
    def _time_exchanges(plan: Any, recorder: OpRecorder) -> None:
        """Let the recorder time the nodes that exchange tokens between experts, in the forward and in the backward."""
        for number in range(plan.num_layers()):
            layer = plan.get_layer(number)
            for node in (layer.moe_dispatch, layer.moe_combine):
                if isinstance(node, ScheduleNode):
                    node.forward_func = recorder.timed_exchange(node.forward_func)
                    node.backward_func = recorder.timed_exchange(node.backward_func)

    def _end_forward(self, forward: _Pass, plan: Any, loss_function: Any, output: torch.Tensor) -> torch.Tensor:
        """End a forward: compute the loss on the last stage, and keep the schedule plan for the backward."""
        microbatch, chunk, *_ = forward
        stage = self.placement.stage_of(self.rank, chunk)
        is_last = stage == self.placement.num_stages - 1
        node = None
        if is_last:
            node = ScheduleNode(loss_function, torch.cuda.current_stream(), plan.event, name="loss_func")
        result, num_tokens = self._calc_loss(chunk, output, node and node.forward, is_last=is_last)
        self._note_output(microbatch, chunk, result, num_tokens)
        self._kept[chunk, microbatch] = _KeptPlan(plan, node)
        return result

    def _gradient_of_output(self, backward: _Pass) -> tuple[Any, torch.Tensor]:
        """Return the schedule plan of a backward, and the gradient of the model's output."""
        plan, loss = self._kept.pop((backward.chunk, backward.microbatch))
        if backward.input_tensor is not None:
            backward.input_tensor.retain_grad()
        if backward.output_grad is not None:
            return plan, backward.output_grad
        assert loss is not None, "only the last stage has no gradient of its output"
        output: Any = backward.output_tensor
        if self._config.grad_scale_func is not None:
            output = self._config.grad_scale_func(output)
        torch.autograd.backward(output)
        return plan, loss.get_grad()

    def restart(self) -> None:
        super().restart()
        self._kept.clear()
