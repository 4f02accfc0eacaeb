"""The parts of a loop over megatron-core: a small model with dropout, its data, a forward step and exact numbers."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Numbers = list[str]
"""Exact values, as hexadecimal digits."""
VOCABULARY = 64
HIDDEN = 16


def begin(num_chunks: int) -> None:
    """Make process groups and random states."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(1, 2, num_chunks if num_chunks > 1 else None)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)


def configuration(**more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    usual = {
        "num_layers": 4,
        "pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(
        hidden_size=HIDDEN,
        batch_p2p_comm=False,  # gloo mixes up the messages of two chunks in a batch
        num_attention_heads=2,
        **{**usual, **more},
    )


def chunk_of(config: Any, chunk: int | None) -> Any:
    """Build a chunk as model providers do."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        vp_stage=chunk,
        share_embeddings_and_output_weights=chunk is None,
    )


def build_others() -> list[Any]:
    """Build two models that are not trained: one that is dropped, and a teacher of one stage on the last rank."""
    dropped = weakref.ref(chunk_of(configuration(), None))
    gc.collect()
    assert dropped() is None, "a model that the loop has dropped stays in memory"
    if dist.get_rank() == 0:
        return []
    return [chunk_of(configuration(pipeline_model_parallel_size=1, num_layers=1), None).eval()]


def hybrid_chunk(config: Any, chunk: int | None) -> Any:
    """Build a stage of a hybrid model, with megatron-core's own layers."""
    from megatron.core import parallel_state

    from megatron.zero_bubble.mcore.decoder_models import HYBRID, HYBRID_RECOMPUTES
    from megatron.zero_bubble.mcore.hybrid_spec import stack_spec

    names = ("hybrid_stack_spec", "hybrid_layer_pattern") if HYBRID_RECOMPUTES else _OLDER_NAMES
    return HYBRID(
        config=config,
        **dict(zip(names, (stack_spec, "*-*-"), strict=True)),
        vocab_size=VOCABULARY,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )


_OLDER_NAMES = ("mamba_stack_spec", "hybrid_override_pattern")
"""Arguments of `MambaModel`."""


def in_ddp(config: Any, chunks: list[Any], **options: Any) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return [DistributedDataParallel(config, DistributedDataParallelConfig(**options), chunk) for chunk in chunks]


def freeze_norms(chunks: list[Any]) -> list[Any]:
    """A hook that is called before the model is wrapped, as for adapters."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_("layernorm" not in name)
    return chunks


def microbatches(step: int, count: int, *, varied: bool = False) -> list[torch.Tensor]:
    """Tokens [batch, length + 1] of a step, of the same length or of different ones."""
    generator = torch.Generator().manual_seed(step)
    lengths = [5 + 3 * (number % 3) for number in range(count)] if varied else [12] * count
    return [torch.randint(VOCABULARY, (1 if varied else 2, length + 1), generator=generator) for length in lengths]


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    tokens = next(data)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.shape[1]
    positions = torch.arange(length).expand_as(inputs)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    output = model(inputs, positions, mask, labels=labels)

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"lm loss": loss.detach()}

    return output, loss_of


def losses_of(reports: list[dict[str, torch.Tensor]]) -> Numbers:
    return [report["lm loss"].item().hex() for report in reports]


def digest_of(model: list[Any]) -> str:
    digest = hashlib.sha256()
    for chunk in model:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
