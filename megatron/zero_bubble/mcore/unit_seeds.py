"""Draws a model's initial weights and dropout from seeds of the model's units, independently of the layout.

megatron-core seeds each pipeline rank once, so that the random numbers of a layer depend on the rank and on all
previous draws of the rank. With this module each unit of the model has its own seeds for its weights and for the
dropout of each microbatch. A unit is the embedding, a layer, a layer of multi-token prediction, or the output layer. As
in megatron-core, tensor-parallel and expert-parallel ranks draw equal random numbers where they hold copies of a
tensor, and different random numbers where they hold parts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.utils import get_attr_wrapped_model, get_model_config, get_pg_rank, unwrap_model

from megatron.zero_bubble.mcore.decoder_models import require_decoder_models
from megatron.zero_bubble.mcore.random_settings import RANDOM_SETTINGS
from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.mcore.restart import copied_rng_states

_MICROBATCH = "zero-bubble-microbatch"
"""Name of the running microbatch's seed in megatron-core's tracker of random states.

For recomputation, megatron-core saves and restores all entries of the tracker, so that recomputation draws the same
random numbers as the forward."""


_DEFAULT = "default-rng"
"""megatron-core's name for the state of the device's random generator outside of the tracker's `fork`."""


class _UnitKind(IntEnum):
    """The kind of a unit of the model; the integer value of the kind enters the unit's seeds."""

    EMBEDDING = 0
    LAYER = 1
    FURTHER = 2
    """A layer of multi-token prediction."""
    OUTPUT = 3


@contextmanager
def initialized_by_unit(seed: int, *, is_first_stage: bool, first_layer: int = 0) -> Iterator[None]:
    """Let each unit of a model draw its weights from its own seed; the `with` block builds one model.

    Args:
        first_layer: number of layers in the stages before the built model, if the built model numbers its own layers
            from 1.
    """
    cpu, cuda, before = copied_rng_states()
    construction = _Construction(seed)
    # A model draws the weights of its embedding first, and the weights of its output layer last.
    construction.begin(_UnitKind.EMBEDDING if is_first_stage else _UnitKind.OUTPUT)
    try:
        with (
            construction.around(TransformerLayer, _UnitKind.LAYER, lambda call: first_layer + _layer_number(call)),
            construction.around(MambaLayer, _UnitKind.LAYER, lambda call: first_layer + call["layer_number"]),
            construction.around(MultiTokenPredictionLayer, _UnitKind.FURTHER, lambda call: call["layer_number"]),
        ):
            yield
    finally:
        # Multi-token prediction may have added a generator of its own, which its forwards need.
        _, _, after = random._get_all_rng_states()
        random._set_all_rng_states(cpu, cuda, {**after, **before})


class _Construction:
    """Seeds the units of a model (embedding, layers, multi-token prediction, output layer) while the model is built."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._is_in_unit = False

    def begin(self, unit: _UnitKind, number: int = 0) -> None:
        seed = _mixed(self._seed, unit, number)
        torch.manual_seed(seed)
        random.model_parallel_cuda_manual_seed(seed)

    def around(
        self, owner: Any, unit: _UnitKind, number_of: Callable[[dict[str, Any]], int]
    ) -> AbstractContextManager[None]:
        """Return a context that seeds the construction of each instance of `owner` that is not inside another unit."""
        original = owner.__init__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def construct(*args: Any, **kwargs: Any) -> None:
            if self._is_in_unit:
                original(*args, **kwargs)
                return
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            self.begin(unit, number_of(call.arguments))
            self._is_in_unit = True
            try:
                original(*args, **kwargs)
            finally:
                self._is_in_unit = False
            self.begin(_UnitKind.OUTPUT)

        return replaced(owner, "__init__", construct)


def _layer_number(call: dict[str, Any]) -> int:
    """Return the model-wide number of the layer that is constructed with the arguments `call`.

    The argument `layer_number` may be the layer's number in the stage.
    """
    if not call.get("add_layer_offset", True):
        return call["layer_number"]
    groups = call["pg_collection"]
    pp_rank = get_pg_rank(groups.pp) if groups is not None else None
    return call["layer_number"] + get_transformer_layer_offset(call["config"], call["vp_stage"], pp_rank)


@contextmanager
def drawn_by_unit(seed: int, chunks: Sequence[torch.nn.Module], iteration: Callable[[], int]) -> Iterator[None]:
    """Inside the `with` block, draw dropout from a separate seed for each unit of the model and each microbatch.

    A unit's seed follows from `seed`, the iteration, the microbatch's number in the iteration, the data-parallel rank
    and the unit. A model that draws no random numbers in its forward stays unchanged.

    Args:
        chunks: this rank's model chunks, with or without wrappers such as DDP.
        iteration: function that returns the number of the running iteration.

    Raises:
        ValueError: a model is of another class than `DECODER_MODELS`, or the tracker of random states is made for CUDA
            graphs, such as Transformer Engine's tracker.
    """
    models = [unwrap_model(chunk) for chunk in chunks]
    require_decoder_models(models, "--zero-bubble-seed-by-layer")
    config = get_model_config(models[0])
    if not any(getattr(config, name, None) for name in RANDOM_SETTINGS):
        yield
        return
    if random.is_graph_safe_cuda_rng_tracker(random.get_cuda_rng_tracker()):
        raise ValueError("dropout by layer needs megatron-core's tracker of random states: leave out --te-rng-tracker")
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)

    def begin_microbatch(model: Any, inputs: Any) -> None:
        if model.training:
            _begin(_mixed(seed, iteration(), model.current_microbatch, replica), _UnitKind.EMBEDDING, 0, _DEFAULT)

    def begin_unit(unit: _UnitKind, generator: str, layer: Any, inputs: Any) -> None:
        if layer.training:
            microbatch = int(random.get_cuda_rng_tracker().get_states()[_MICROBATCH])
            _begin(microbatch, unit, layer.layer_number, generator)

    set_microbatch = schedules.set_current_microbatch

    # megatron-core sets the number of the microbatch only in the layers.
    def set_in_model_too(model: torch.nn.Module, microbatch_id: int) -> None:
        set_microbatch(model, microbatch_id)
        get_attr_wrapped_model(model, "decoder", return_model_obj=True).current_microbatch = microbatch_id

    with ExitStack() as hooks:
        hooks.enter_context(replaced(schedules, "set_current_microbatch", set_in_model_too))
        for model in models:
            # Under sequence parallelism a `TransformerBlock` runs its layers in a fork of the tensor-parallel state.
            forks = config.sequence_parallel and isinstance(model.decoder, TransformerBlock)
            in_decoder = random._MODEL_PARALLEL_RNG_TRACKER_NAME if forks else _DEFAULT
            further = model.mtp.layers if getattr(model, "mtp_process", False) else ()
            hooks.callback(model.register_forward_pre_hook(begin_microbatch).remove)
            layers = [(layer, _UnitKind.LAYER, in_decoder) for layer in model.decoder.layers]
            layers += [(layer, _UnitKind.FURTHER, _DEFAULT) for layer in further]
            for layer, unit, generator in layers:
                begin = functools.partial(begin_unit, unit, generator)
                hooks.callback(layer.register_forward_pre_hook(begin).remove)
        yield


def _begin(microbatch: int, unit: _UnitKind, number: int, current: str) -> None:
    """Seed the random states for one microbatch's forward through a unit of the model.

    Args:
        microbatch: the microbatch's seed.
        current: name of the state that the device's generator has while the unit runs.
    """
    states = _generator_states(_mixed(microbatch, unit, number))
    random._set_cuda_rng_state(states[current])
    del states[_DEFAULT]
    tracker = random.get_cuda_rng_tracker()
    tracker.set_states({**tracker.get_states(), **states, _MICROBATCH: torch.tensor(microbatch)})


def _generator_states(seed: int) -> dict[str, torch.Tensor]:
    """Return a dict of the states that `model_parallel_cuda_manual_seed(seed)` gives this rank's random generators."""
    seeds = {
        _DEFAULT: seed,
        random.get_data_parallel_rng_tracker_name(): seed,
        random._MODEL_PARALLEL_RNG_TRACKER_NAME: seed + 2718 + parallel_state.get_tensor_model_parallel_rank(),
        random.get_expert_parallel_rng_tracker_name(): seed
        + 1024
        + 100 * parallel_state.get_expert_model_parallel_rank()
        + parallel_state.get_expert_tensor_parallel_rank(),
    }
    generator = torch.Generator(torch.device(torch.cuda.current_device()))
    return {name: generator.manual_seed(number).get_state() for name, number in seeds.items()}


def _mixed(*numbers: int) -> int:
    """Return a seed of 63 bits, a hash of `numbers`; different `numbers` almost surely have different seeds."""
    digest = blake2b(repr([*map(int, numbers)]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
