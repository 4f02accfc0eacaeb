"""Attention through torch's kernels is megatron-core's local attention, within rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import layers as mcore_layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from split_layers import one_rank

from megatron.zero_bubble.mcore import linear
from megatron.zero_bubble.mcore.attention import TorchAttention
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.trainer import model
from megatron.zero_bubble.trainer.arguments import Arguments, parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check
from megatron.zero_bubble.trainer.model import build_model, transformer_config
from tests.launch import TINY_GPT

SEQUENCE, BATCH, HEADS, CHANNELS = 9, 2, 4, 8


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield


def attention(
    kind: type[DotProductAttention], num_groups: int, dropout: float, *, sequence_parallel: bool = False
) -> DotProductAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        num_query_groups=num_groups,
        attention_dropout=dropout,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
    )
    config.sequence_parallel = sequence_parallel
    return kind(config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")


def run(module: torch.nn.Module, num_groups: int, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The output and the gradients of query, key and value."""
    generator = torch.Generator().manual_seed(3)
    inputs = [
        torch.randn(SEQUENCE, BATCH, heads, CHANNELS, generator=generator).requires_grad_()
        for heads in (HEADS, num_groups, num_groups)
    ]
    output = module(*inputs, mask)
    output.backward(torch.randn(output.shape, generator=generator))
    return [output.detach(), *(x.grad for x in inputs)]


def documents() -> torch.Tensor:
    """A mask like that of --reset-attention-mask: a new document begins at the fifth token of the second sequence."""
    mask = torch.ones(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    mask[1, 0, 4:, :4] = True
    return mask


@pytest.mark.parametrize("num_groups", [HEADS, 2], ids=["", "grouped"])
@pytest.mark.parametrize("mask", [None, documents()], ids=["causal", "documents"])
def test_output_and_gradients_are_megatron_cores(num_groups, mask):
    expected = run(attention(DotProductAttention, num_groups, 0.0), num_groups, mask)
    ours = run(attention(TorchAttention, num_groups, 0.0), num_groups, mask)
    for tensor, its in zip(ours, expected, strict=True):
        assert tensor.shape == its.shape
        torch.testing.assert_close(tensor, its, rtol=1e-5, atol=1e-5)
    assert ours[0].is_contiguous()


def test_dropout_is_active_in_training_alone():
    module = attention(TorchAttention, HEADS, 0.5)
    without = run(attention(TorchAttention, HEADS, 0.0), HEADS, None)
    assert not torch.equal(run(module, HEADS, None)[0], without[0])
    assert torch.equal(run(module.eval(), HEADS, None)[0], without[0])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_from_the_generator_that_megatron_core_s_draws_from(sequence_parallel):
    """Attention switches to the tensor-parallel rank's generator, unless sequence parallelism has done so before."""
    tracker = tensor_parallel.get_cuda_rng_tracker()

    def moved(kind: type[DotProductAttention]) -> tuple[bool, bool]:
        before, own = torch.cuda.get_rng_state(), tracker.get_states()["model-parallel-rng"].clone()
        run(attention(kind, HEADS, 0.5, sequence_parallel=sequence_parallel), HEADS, None)
        after = tracker.get_states()["model-parallel-rng"]
        return not torch.equal(before, torch.cuda.get_rng_state()), not torch.equal(own, after)

    assert moved(TorchAttention) == moved(DotProductAttention) == (sequence_parallel, not sequence_parallel)


@pytest.mark.parametrize(
    ("flags", "has_cuda", "expected"),
    [
        ((), False, DotProductAttention),
        ((), True, TorchAttention),
        (("--attention-backend", "local"), True, DotProductAttention),
        (("--attention-backend", "unfused"), True, DotProductAttention),
        (("--attention-backend", "flash"), False, TorchAttention),
    ],
)
def test_the_flag_and_the_machine_choose(flags, has_cuda, expected):
    args, config = trainer(*flags, has_cuda=has_cuda)
    (chunk,) = build_model(args, config, Session.to_build(JobFlags.of(args), Placement("linear", 1)))
    layers = chunk.module.decoder.layers
    assert [type(layer.self_attention.core_attention) for layer in layers] == [expected] * 2


@pytest.mark.parametrize(("has_cuda", "has_apex"), [(True, True), (True, False), (False, True)])
def test_with_apex_on_a_gpu_its_kernel_accumulates_gradients_unless_a_flag_says_otherwise(
    monkeypatch, has_cuda, has_apex
):
    with monkeypatch.context() as machine:
        machine.setattr(torch.cuda, "is_available", lambda: has_cuda)
        machine.setattr(mcore_layers, "_grad_accum_fusion_available", has_apex)
        fuses = linear.fuses_accumulation()
    assert fuses is (has_cuda and has_apex)
    monkeypatch.setattr(model, "fuses_accumulation", lambda: fuses)
    assert trainer()[1].gradient_accumulation_fusion is fuses
    assert trainer("--no-gradient-accumulation-fusion")[1].gradient_accumulation_fusion is False


def trainer(*flags: str, has_cuda: bool = False) -> tuple[Arguments, TransformerConfig]:
    """The arguments and the model configuration that `pretrain_gpt.py` makes of these flags, with or without CUDA."""
    parsed = parse_arguments([*TINY_GPT, "--num-layers", "2", *flags])
    args, _ = complete_and_check(parsed, {}, has_cuda, for_this_machine=False)
    args = replace(args, padded_vocab_size=128)
    return args, transformer_config(args, 1, None)
