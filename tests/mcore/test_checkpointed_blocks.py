"""A block that R recomputes computes, bit for bit, what megatron-core's checkpoint computes in its backward.

One rank in one process: first every F, then R and B of every microbatch, then every W. Dropout is on.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from megatron.zero_bubble.cli.check.stage_run import NUM_MICROBATCHES, make_stage
from megatron.zero_bubble.cli.trainings import complete_arguments, one_process, rank_model
from megatron.zero_bubble.mcore.checkpointed_blocks import checkpoint_every_layer
from megatron.zero_bubble.mcore.forward_backward import MegatronStage
from megatron.zero_bubble.mcore.step_call import refuse_unsplit_recomputation
from megatron.zero_bubble.runtime.communicator import Communicator
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule, lower
from megatron.zero_bubble.schedule.recomputation import recomputes_blocks, with_recomputation
from megatron.zero_bubble.schedules import get_forward_backward_func
from megatron.zero_bubble.trainer.arguments import Arguments
from tests.launch import TINY_GPT
from tests.turns import run_in_turns

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, for which megatron-core is adapted")

LINEAR = Placement("linear", 1)
UNTIED = "--untie-embeddings-and-output-weights"


def checkpointed(method: str, num_layers: int) -> tuple[str, ...]:
    return (
        *("--recompute-granularity", "full", "--recompute-method", method),
        *("--recompute-num-layers", str(num_layers), UNTIED),
    )


MODELS = {
    "every layer": checkpointed("uniform", 1),
    "two layers at once": checkpointed("uniform", 2),
    "the whole stage": checkpointed("uniform", 4),
    "the first layer": checkpointed("block", 1),
    "the first three, bf16": (*checkpointed("block", 3), "--bf16"),
    "experts": (
        *(*checkpointed("uniform", 1), "--num-experts", "4", "--moe-aux-loss-coeff", "0.1", "--disable-bias-linear"),
    ),
    "further tokens": (*checkpointed("uniform", 1), "--mtp-num-layers", "2"),
    "rotary embedding": (*checkpointed("uniform", 1), "--position-embedding-type", "rope", "--swiglu"),
}
RECOMPUTED_LAYERS = {"the first layer": 1, "the first three, bf16": 3, "further tokens": 6}


def late_backwards(recomputed: Sequence[int], num_groups: int = 1) -> Schedule:
    microbatches = range(NUM_MICROBATCHES)
    plain = [Op(kind, microbatch) for kind in (OpKind.F, OpKind.B, OpKind.W) for microbatch in microbatches]
    schedule = with_recomputation(Schedule("late-backwards", LINEAR, NUM_MICROBATCHES, (tuple(plain),)))
    ops = (op for op in schedule.ops[0] if op.kind is not OpKind.R or op.microbatch in recomputed)
    return lower(replace(schedule, ops=(tuple(ops),), groups=(num_groups,) if num_groups > 1 else ()))


class Rank:
    """A model, with the random state that every step on it begins with."""

    def __init__(self, args: Arguments) -> None:
        self.args, self.store = args, WeightGradStore()
        self.chunks: list[Any] = rank_model(args, LINEAR, 0, self.store)
        self.random_states = random._get_all_rng_states()
        self.forwards: Counter[OpKind] = Counter()
        """How often the forward of a layer has run in the operations of a kind, in the last step."""
        self._kind = OpKind.F
        for module in self.chunks[0].modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_hook(lambda *_: self.forwards.update([self._kind]))

    def step(self, recomputed: Sequence[int], store: RecomputationStore | None, num_groups: int = 1) -> dict[str, Any]:
        """The losses, gradients and final random numbers of a step."""
        *generators, tracked = self.random_states
        random._set_all_rng_states(*generators, dict(tracked))
        self.chunks[0].zero_grad_buffer()
        self.forwards.clear()

        def run(rank: int, communicator: Communicator) -> MegatronStage:
            stage = make_stage(self.args, LINEAR, rank, self.chunks, torch.device("cpu"))
            stage = replace(stage, recomputation_store=store)
            schedule = late_backwards(recomputed, num_groups)
            executor = Executor(schedule, rank, communicator, self.store, store)
            executor.run(stage, self)  # type: ignore[arg-type]
            stage.finish()
            return stage

        losses = run_in_turns(1, run)[0].forward_data_store
        gradients = {name: parameter.main_grad.clone() for name, parameter in self.chunks[0].named_parameters()}
        return {"losses": [loss["lm loss"] for loss in losses], "random": torch.rand(4), **gradients}

    def begin(self, op: Op) -> None:
        self._kind = op.kind

    def end(self, *ops: Op) -> None:
        pass

    def close(self) -> None:
        pass

    @contextmanager
    def timed_within(self, kind: OpKind) -> Iterator[None]:
        before, self._kind = self._kind, kind
        yield
        self._kind = before


def arguments(*flags: str) -> Arguments:
    sizes = ("--num-layers", "4", "--micro-batch-size", "2", "--clip-grad", "0")
    return complete_arguments([*TINY_GPT, *sizes, *flags], 1, "test", has_cuda=False)


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    # megatron-core compiles what experts call, unless torch knew better when it was imported.
    with torch.compiler.set_stance("force_eager"), one_process(arguments()):
        yield


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert all(map(torch.equal, found.pop("losses"), expected.pop("losses")))
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("model", MODELS)
def test_r_and_b_are_megatron_cores_backward(model: str):
    rank, everything = Rank(arguments(*MODELS[model])), range(NUM_MICROBATCHES)
    layers = 4 if rank.args.mtp_num_layers is None else 6
    recomputed = RECOMPUTED_LAYERS.get(model, 4) * NUM_MICROBATCHES
    expected = rank.step((), None)
    assert rank.forwards == {OpKind.F: layers * NUM_MICROBATCHES, OpKind.B: recomputed}
    assert any(gradient.any() for name, gradient in expected.items() if name.endswith("linear_fc1.weight"))

    store = RecomputationStore()
    assert_same(rank.step(everything, store), dict(expected))
    assert rank.forwards == {OpKind.F: layers * NUM_MICROBATCHES, OpKind.R: recomputed}
    assert store.dropped() == []

    assert_same(rank.step((0, 3, 4), store), dict(expected))
    assert rank.forwards == {OpKind.F: layers * NUM_MICROBATCHES, OpKind.R: recomputed * 3 // NUM_MICROBATCHES}


@pytest.mark.parametrize(
    ("model", "num_groups"),
    [
        ("every layer", 3),
        ("the first three, bf16", 2),
        # The same code with other layers and other groups.
        *(pytest.param(model, groups, marks=pytest.mark.exhaustive) for model in MODELS for groups in (2, 4, 9)),
    ],
)
def test_in_groups_r_restores_the_last_and_b_the_others(model: str, num_groups: int):
    rank, everything = Rank(arguments(*MODELS[model])), range(NUM_MICROBATCHES)
    expected = rank.step((), None)
    forwards_in_b = rank.forwards[OpKind.B]
    store = RecomputationStore()
    assert_same(rank.step(everything, store, num_groups), dict(expected))
    assert rank.forwards[OpKind.R] == forwards_in_b, "each once, in R or in B"

    assert_same(rank.step((0, 3, 4), store, num_groups), dict(expected))
    kept = (NUM_MICROBATCHES - 3) * -(-store.num_blocks[0] // min(num_groups, store.num_blocks[0]))
    layers_of_block = forwards_in_b // NUM_MICROBATCHES // store.num_blocks[0]
    assert rank.forwards[OpKind.R] == forwards_in_b - kept * layers_of_block, "the last group is kept without an R"
    assert_same(rank.step((), store, num_groups), dict(expected))


def test_a_schedule_recomputes_any_layer_of_a_model_that_recomputes_none():
    rank = Rank(arguments(UNTIED))
    config = get_model_config(rank.chunks[0])
    kept = rank.step((), None)
    checkpoint_every_layer(config)
    assert recomputes_blocks(config)
    assert_same(rank.step((1, 2), RecomputationStore()), kept)
    assert rank.forwards[OpKind.R] == 2 * 4


@pytest.mark.parametrize("num_groups", [1, 3])
def test_layers_behind_a_frozen_embedding_have_their_gradients(num_groups: int):
    """A schedule recomputes them, although no input of the first block needs a gradient."""
    rank = Rank(arguments(UNTIED))
    for name, parameter in rank.chunks[0].named_parameters():
        parameter.requires_grad_("embedding" not in name)
    kept = rank.step((), None)
    checkpoint_every_layer(get_model_config(rank.chunks[0]))
    assert_same(rank.step(range(NUM_MICROBATCHES), RecomputationStore(), num_groups), kept)


def test_a_training_loop_of_ones_own_asks_for_it():
    rank = Rank(arguments(*MODELS["every layer"]))
    stage = make_stage(rank.args, LINEAR, 0, rank.chunks, torch.device("cpu"))
    step = {
        "forward_step_func": stage.call.forward_step_func,
        "data_iterator": stage.data_iterators[0],
        "model": rank.chunks,
        "num_microbatches": NUM_MICROBATCHES,
        "seq_length": rank.args.seq_length,
        "micro_batch_size": rank.args.micro_batch_size,
    }
    forward_backward = get_forward_backward_func("gpipe", rank.store, recompute="full")
    forward_backward(**step)
    assert forward_backward.running.schedule(NUM_MICROBATCHES).recomputes
    assert rank.forwards.total() == 2 * 4 * NUM_MICROBATCHES
    get_model_config(rank.chunks[0]).recompute_granularity = "selective"
    with pytest.raises(ValueError, match=r"^a schedule that recomputes needs .* 'full'.*, got 'selective'$"):
        forward_backward(**step)
    forward_backward.close()


def test_r_gathers_what_tensor_parallel_ranks_have_kept_their_parts_of():
    rank = Rank(arguments(*MODELS["every layer"]))
    get_model_config(rank.chunks[0]).distribute_saved_activations = True
    expected = rank.step((), None)
    assert_same(rank.step(range(NUM_MICROBATCHES), RecomputationStore()), expected)


def test_transformer_engines_checkpoint_recomputes_in_b(monkeypatch: pytest.MonkeyPatch):
    """With fp8 megatron-core calls Transformer Engine's checkpoint; here torch's stands in for it.

    There is no dropout, because torch's does not restore megatron-core's random states.
    """
    calls = []

    def te_checkpoint(block: Any, distribute_saved_activations: bool, tracker: Any, group: Any, *inputs: Any) -> Any:
        calls.append(block)
        return torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=True)

    rank, store = (
        Rank(arguments(*MODELS["every layer"], "--attention-dropout", "0", "--hidden-dropout", "0")),
        RecomputationStore(),
    )
    expected = rank.step((), None)
    monkeypatch.setattr(transformer_block, "te_checkpoint", te_checkpoint)
    config = get_model_config(rank.chunks[0])
    config.fp8 = "hybrid"
    assert not recomputes_blocks(config)
    assert_same(rank.step((), store), expected)
    assert len(calls) == rank.forwards[OpKind.B] == 4 * NUM_MICROBATCHES


@pytest.mark.parametrize(
    ("granularity", "more"),
    [("selective", {}), (None, {}), ("full", {"fp8": "hybrid"}), ("full", {"fp4": "e2m1"})],
)
def test_a_model_whose_backward_recomputes_is_refused_in_one_line(granularity: str | None, more: dict[str, str]):
    config = SimpleNamespace(**{"recompute_granularity": granularity, "fp8": None, "fp4": None, **more})
    with pytest.raises(
        ValueError, match=r"^a schedule that recomputes needs a model .*recompute_granularity 'full'.*$"
    ):
        refuse_unsplit_recomputation(config)
