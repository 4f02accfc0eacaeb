"""Trainings whose vocabulary is in shards, against megatron-core's own schedule and an emulation in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vocabulary_training import EMULATED, Outcome, Training, run_job

from megatron.zero_bubble.mcore.recorded_call import ForwardStepError, RecordedCall
from megatron.zero_bubble.mcore.vocabulary_model import SummedEmbedding
from megatron.zero_bubble.mcore.vocabulary_stage import VocabularyStep

TOKENS = torch.zeros(1, 4, dtype=torch.long)
TWO_STAGES = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0")
UNTIED = ("--untie-embeddings-and-output-weights",)
SCHEDULES = ("1f1b", "zb-h1", "zb-2p", "zb-v", "interleaved-zb")


@pytest.fixture(scope="module", params=[(), UNTIED], ids=["tied", "untied"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    trainings = {
        "theirs": Training(None, is_sharded=False),
        EMULATED: Training(),
        **{schedule: Training(schedule) for schedule in SCHEDULES},
        "warmed up": Training(warms_up=True),
    }
    return run_job(2, trainings, [*TWO_STAGES, *request.param], tmp_path_factory.mktemp("vocabulary"))


def difference_of_losses(ours: Outcome, theirs: Outcome) -> float:
    """The largest relative difference of a microbatch's loss, in training and evaluation."""
    pairs = [zip(ours[what], theirs[what], strict=True) for what in ("losses", "evaluation")]
    return max(abs(a / b - 1) for pair in pairs for a, b in pair)


def difference_of_gradients(ours: Outcome, theirs: Outcome) -> float:
    """The largest difference of a gradient in the first step, in terms of the largest one of its parameter.

    Adam divides a gradient by its size, so that from the second step on rounding errors of small gradients are large.
    """
    a, b = ours["gradients"][0], theirs["gradients"][0]
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in a)


def assert_same_step(ours: Outcome, theirs: Outcome, step: int) -> None:
    a, b = ours["gradients"][step], theirs["gradients"][step]
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_losses_and_gradients_are_those_of_megatron_core(outcomes):
    assert difference_of_losses(outcomes["zb-h1"], outcomes["theirs"]) < 1e-6
    assert difference_of_gradients(outcomes["zb-h1"], outcomes["theirs"]) < 1e-5
    assert outcomes["zb-h1"]["norms"] == pytest.approx(outcomes["theirs"]["norms"], rel=1e-6)


@pytest.mark.parametrize("schedule", [*(name for name in SCHEDULES if name != "zb-h1"), "warmed up"])
def test_all_schedules_give_the_same_bits(outcomes, schedule):
    ours, other = outcomes[schedule], outcomes["zb-h1"]
    assert ours["losses"] == other["losses"]
    assert ours["evaluation"] == other["evaluation"]
    for step in range(2):
        assert_same_step(ours, other, step)


def test_a_step_is_bit_for_bit_that_of_one_process(outcomes):
    ours, emulated = outcomes["zb-h1"], outcomes[EMULATED]
    assert ours["losses"][: len(emulated["losses"])] == emulated["losses"]
    assert_same_step(emulated, {**ours, "gradients": ours["gradients"][:1]}, 0)


TENSOR_PARALLEL = (*TWO_STAGES, "--tensor-model-parallel-size", "2")
SEQUENCE_PARALLEL = ("--sequence-parallel",)
ROTARY = ("--position-embedding-type", "rope")
"""Without learned positions megatron-core reduces and scatters the embedding of sequence parallelism in one step."""


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(SEQUENCE_PARALLEL + ROTARY, id="sequence parallel, rotary"),
        pytest.param(SEQUENCE_PARALLEL + UNTIED, id="sequence parallel", marks=pytest.mark.exhaustive),
        pytest.param((), id="", marks=pytest.mark.exhaustive),
    ],
)
def test_tensor_parallel_ranks_have_shards_of_their_own(flags, tmp_path):
    trainings = {"theirs": Training(None, is_sharded=False), "zb-h1": Training("zb-h1"), "zb-v": Training("zb-v")}
    outcomes = run_job(4, trainings, [*TENSOR_PARALLEL, *flags], tmp_path)
    assert difference_of_losses(outcomes["zb-h1"], outcomes["theirs"]) < 1e-6
    assert difference_of_gradients(outcomes["zb-h1"], outcomes["theirs"]) < 1e-5
    assert outcomes["zb-v"]["losses"] == outcomes["zb-h1"]["losses"]
    assert_same_step(outcomes["zb-v"], outcomes["zb-h1"], 1)


def error_of_gradients(ours: Outcome, exact: Outcome, loss_scale: int) -> float:
    """The root mean square, over parameters, of the relative error of a gradient in the first step."""
    a, b = ours["gradients"][0], exact["gradients"][0]
    errors = [(a[name].float() / loss_scale - b[name]).norm() / b[name].norm() for name in a]
    return torch.stack(errors).square().mean().sqrt().item()


@pytest.mark.parametrize(
    ("flags", "loss_scale"),
    [
        pytest.param(("--bf16",), 1, id="bf16"),
        pytest.param(("--fp16", "--initial-loss-scale", "1024"), 1024, id="fp16", marks=pytest.mark.exhaustive),
    ],
)
def test_16_bits_are_as_exact_as_those_of_megatron_core(flags, loss_scale, tmp_path):
    """Measured by the gradients in fp32. The last stage of the V is the loss alone."""
    trainings = {
        "exact": Training(None, is_sharded=False),
        "theirs": Training(None, flags, is_sharded=False),
        "zb-h1": Training("zb-h1", flags),
        "zb-v": Training("zb-v", (*flags, "--pipeline-model-parallel-layout", "Et|tt|t|L")),
    }
    outcomes = run_job(2, trainings, TWO_STAGES, tmp_path)
    ours, theirs = (error_of_gradients(outcomes[name], outcomes["exact"], loss_scale) for name in ("zb-h1", "theirs"))
    assert ours < 1.1 * theirs
    assert outcomes["zb-v"]["losses"] == outcomes["zb-h1"]["losses"]
    assert_same_step(outcomes["zb-v"], outcomes["zb-h1"], 1)


@pytest.mark.parametrize("gives_embeddings", [False, True])
def test_a_forward_step_that_embeds_its_tokens_itself_is_refused(gives_embeddings):
    """The model of a language model with images, for example, gets embeddings and no tokens: EW has no gradient."""
    layer = SummedEmbedding(SimpleNamespace(reduce_scatter_embeddings=False, tp_group=None))
    state = SimpleNamespace(looked_up=torch.ones(1, 4, 8), call=RecordedCall((TOKENS,), {}, None), outgoing={})
    step = SimpleNamespace(
        _microbatches=[state], _run=SimpleNamespace(embedding_layer=layer), _forward_only=True, _token_shape=(1, 4)
    )

    def model(tokens):
        if not gives_embeddings:
            layer.looked_up = None
        return tokens

    def end():
        return VocabularyStep.forward_first_stage(step, 0, None, model)

    if not gives_embeddings:
        assert end() == (TOKENS, None)
        return
    with pytest.raises(ForwardStepError, match=r"decoder_input: give --zero-bubble-vocabulary-parallel off$"):
        end()
    with pytest.raises(ForwardStepError, match=r"^the forward step gave the model no tokens, but .* needs \(1, 4\)"):
        VocabularyStep.read(step, 0, lambda data, model: (model(decoder_input=data), None), None, torch.nn.Identity())
    layer.looked_up = None
    with pytest.raises(ForwardStepError, match=r"^the forward step calls model.embedding: give --zero-bubble-vocab"):
        layer(TOKENS)
