"""Measures the costs of each unit of a script's model, before the script builds the model.

A unit is the embedding, a layer, or all modules after the layers. The script's own code builds the units: for each
unit, this module calls the code that builds the model, with the settings of a pipeline of one rank. A hook around the
model's constructor builds one unit in place of the model. A hook around DDP's constructor wraps the unit, and raises an
exception to leave the script's code.
"""

from __future__ import annotations

import contextlib
import copy
import io
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import unwrap_model

from megatron.zero_bubble.launcher.ddp_arguments import construct_ddp
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.mcore.decoder_models import DECODER_MODELS, DECODER_NAMES, HYBRID
from megatron.zero_bubble.mcore.linear import split_weight_gradients
from megatron.zero_bubble.mcore.model_units import Unit, keep_unit, random_microbatch
from megatron.zero_bubble.mcore.placement import StagePosition
from megatron.zero_bubble.mcore.vocabulary_model import why_not_replaced
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.job_flags import JobFlags, keeping_everything
from megatron.zero_bubble.session.running import units_of
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.session.start_up import SessionError

_ONE_RANK = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
}
"""Values of the script's arguments, and of megatron-core's configuration, for a pipeline of one rank."""
_PRECISION = {"bf16": False, "fp16": False, "accumulate_allreduce_grads_in_fp32": False, "sgd_momentum": 0.9}
"""Arguments on which the memory of model states depends, with the values for scripts that lack the arguments."""


class _LeavesScript(BaseException):
    """An exception that carries a value out of the script's code; `except Exception` does not catch the exception."""


class ScriptUnits:
    """Builds the units of a script's model one by one, and leaves the script's code by an exception after each unit.

    Args:
        script: the script's arguments.
    """

    def __init__(self, script: Namespace, flags: JobFlags) -> None:
        self._script, self._flags = script, flags
        self._unit: Unit | None = None
        self._store = WeightGradStore()
        self.is_building = False
        """Whether the script builds a unit, whose costs are measured, instead of the script's own model."""
        self.shapes_vary = False
        """Whether `variable_seq_lengths` is set in the model's configuration; known after `measure`."""
        self.keeps_vocabulary = False
        """Whether shards cannot replace the model's own embedding, output layer and loss; known after `measure`."""

    def measure(self, setup: Call, session: Session) -> ModelCosts:
        """Measure the costs of all units of the model that `setup` would build; a collective call of all ranks.

        Raises:
            SessionError: the costs of this model cannot be measured.
        """
        arguments = self._begin(setup)
        if not isinstance(arguments, Call):
            raise SessionError(
                f"costs can be measured only for megatron-core's {DECODER_NAMES}, but the script builds another"
            )
        config, script = arguments["config"], self._script
        self.shapes_vary = config.variable_seq_lengths
        settings = Namespace(**{**_PRECISION, **vars(script), **vars(self._flags)})
        context_size = parallel_state.get_context_parallel_world_size()
        # With context parallelism, Transformer Engine computes the attention and makes the mask itself.
        has_mask = context_size == 1 and bool(getattr(script, "create_attention_mask_in_dataloader", False))
        microbatch = random_microbatch(
            arguments["vocab_size"], script.micro_batch_size, script.seq_length // context_size, has_mask=has_mask
        )
        microbatch = {name: tensor.to(torch.cuda.current_device()) for name, tensor in microbatch.items()}
        models = units_of(settings, config, partial(self._build, setup), _forward_step, microbatch)
        if _pattern(arguments) is None and isinstance(arguments["self"], HYBRID):
            raise SessionError("the model has no layers without --hybrid-layer-pattern")
        layers = _layers(arguments)
        distinct = _distinct(layers)
        return session.unit_costs(models, [distinct.index(layer) for layer in layers])

    def _build(self, setup: Call, unit: Unit, store: WeightGradStore) -> torch.nn.Module:
        self._unit, self._store = unit, store
        try:
            model = self._begin(setup)
        finally:
            self._unit = None
        if not isinstance(model, torch.nn.Module):
            raise SessionError(
                "costs can be measured only for a model in DDP, but the script builds a model without DDP"
            )
        built = unwrap_model(model)
        if not isinstance(built, DECODER_MODELS):
            raise SessionError(f"the script's model is a {type(built).__name__} around megatron-core's {DECODER_NAMES}")
        reason = why_not_replaced(built if unit.embeds else None, built if unit.is_last else None)
        self.keeps_vocabulary |= reason is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # scripts wrap the model in DDP on a separate stream
        return model

    def _begin(self, setup: Call) -> Any:
        """Run the script's model-building code for one pipeline rank; return the value that `_LeavesScript` carries."""
        for name in ("fp8", "fp4"):
            if value := getattr(self._script, name, None):
                raise SessionError(
                    f"--{name}-format {value}: the costs of a model cannot be measured before it is built, because "
                    "Transformer Engine's scaling remembers every forward"
                )
        settings = {**_ONE_RANK, **keeping_everything(self._script)}
        # From Megatron-LM 0.19 on, scripts make the model's configuration before the process groups.
        container = setup.get("cfg_container")
        config = getattr(getattr(container, "model", None), "transformer", None)
        changed = [(owner, change_settings(owner, settings)) for owner in (self._script, config) if owner is not None]
        self.is_building = True
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the output would describe a pipeline of one rank
                setup.proceed()
            return None
        except _LeavesScript as leaving:
            return leaving.args[0]
        finally:
            self.is_building = False
            for owner, before in changed:
                vars(owner).update(before)

    def build_chunk(self, call: Call) -> None:
        """Build the requested unit instead of a model; if no unit is requested, leave the script's code."""
        unit = self._unit
        if unit is None:
            raise _LeavesScript(call)
        # Copied, because the script may build its own model with the same configuration.
        config = copy.copy(call["config"])
        config.num_layers = 1
        if not unit.is_last:
            config.mtp_num_layers = None
        groups = copy.copy(call["pg_collection"] or ProcessGroupCollection.use_mpu_process_groups())
        groups.pp = StagePosition(0, 1)
        layer = _distinct(_layers(call))[unit.layer or 0]
        if pattern := _pattern(call):
            call["hybrid_layer_pattern"] = str(HybridPattern((layer.kind,), pattern.further if unit.is_last else ""))
        elif layer.kind is not None:
            spec = call["transformer_layer_spec"] = copy.copy(call["transformer_layer_spec"])
            spec.layer_specs = [layer.kind]
        for name, value in (("window_attn_skip_freq", layer.has_window), ("no_rope_freq", layer.lacks_rope)):
            if getattr(config, name, None):
                # Layers of multi-token prediction have numbers of their own, or follow the unit's layer (0.16).
                setattr(config, name, [value] * (1 + (config.mtp_num_layers or 0)))
        if layer.communication is not None:
            config.cp_comm_type = layer.communication
        if call.get("mtp_block_spec") is not None and not unit.is_last:
            call["mtp_block_spec"] = None
        call["config"], call["pg_collection"] = config, groups
        call["pre_process"], call["post_process"], call["vp_stage"] = unit.embeds, unit.is_last, None
        call.proceed()
        keep_unit(call["self"], unit._replace(layer=None if unit.layer is None else 0))

    def wrap_in_ddp(self, call: Call) -> None:
        """Split the backward of a unit into B and W, wrap the unit in DDP, and leave the script's code."""
        split_weight_gradients([call["module"]], self._store)
        # During the measurement, replicas neither gather parameters nor reduce gradients.
        # Copied, because a measurement sets the configuration's functions, and the script's own model may share it.
        call["config"] = copy.copy(call["config"])
        construct_ddp(call, overlap_grad_reduce=False, overlap_param_gather=False)
        raise _LeavesScript(call["self"])


def change_settings(owner: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Set the attributes in `settings` that `owner` already has, and return the previous values."""
    before = {name: value for name, value in vars(owner).items() if name in settings}
    vars(owner).update({name: settings[name] for name in before})
    return before


def _pattern(call: Call) -> HybridPattern | None:
    """Return the layer pattern in a call of a model's constructor; None if the call has no layer pattern."""
    text = call.get("hybrid_layer_pattern")
    return None if text is None else HybridPattern.parse(text)


class _Layer(NamedTuple):
    """The properties in which the layers of a model may differ."""

    kind: Any
    """Spec of the layer, or symbol in a layer pattern; None if all layers share one spec."""
    has_window: int = 0
    lacks_rope: int = 0
    communication: str | None = None
    """Communication of attention between context-parallel ranks, if it differs between layers."""


def _layers(call: Call) -> list[_Layer]:
    """Return the properties of every layer of a model under construction."""
    if pattern := _pattern(call):
        return list(map(_Layer, pattern.symbols))
    config = call["config"]
    words = getattr(config, "cp_comm_type", None)
    communications = words if isinstance(words, list) and config.context_parallel_size > 1 else [None]
    specs = getattr(call.get("transformer_layer_spec"), "layer_specs", None) or [None] * config.num_layers
    return [
        _Layer(
            spec,
            int(is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number)),
            config.no_rope_freq[number - 1] if config.no_rope_freq else 0,
            communications[(number - 1) % len(communications)],
        )
        for number, spec in enumerate(specs, 1)
    ]


def _distinct(layers: list[_Layer]) -> list[_Layer]:
    """Return the first layer of each kind, in model order. Specs are compared, because they are not hashable."""
    return [layer for index, layer in enumerate(layers) if layer not in layers[:index]]


def _forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    predicts_further = getattr(unwrap_model(model), "mtp_process", False)
    further = {"loss_mask": batch["loss_mask"]} if predicts_further else {}
    output = model(
        batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"], **further
    )
    return output, _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of the tokens, the number of tokens, and the loss to report."""
    loss = output.float().sum()
    return loss, torch.tensor(output.numel(), dtype=torch.int, device=output.device), {"loss": loss.detach()}
