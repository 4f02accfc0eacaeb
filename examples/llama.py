"""A Hugging Face Llama, trained on two ranks and compared bit for bit with one process.

    torchrun --nproc-per-node 2 examples/llama.py

The idea. A model of the transformers library is a tree of modules. A pipeline needs a list of layers, each of which
takes the output of the previous layer: here the embedding, the decoder layers, the norm and the output layer. Only a
decoder layer needs one more argument, the rotary embedding of the positions.

The demonstration. The pipeline trains the model's own modules, so that each rank finds the trained weights of its
layers in the model. Nothing is downloaded: the weights are random, and the text is the source code of Python's standard
library. For a model that does not fit into one rank's memory, `LayerSpec(Block, config, index)` builds each layer only
on the rank that has the layer.

The test. The whole model trains in one process. The pipeline and the single process must have the same losses and
parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from megatron.zero_bubble import Pipeline, PipelineOptions

NUM_STEPS, NUM_MICROBATCHES, BATCH_SIZE, SEQUENCE_LENGTH, MAX_NORM = 10, 8, 16, 64, 1.0

CONFIG = LlamaConfig(
    vocab_size=256,  # bytes
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=SEQUENCE_LENGTH,
    attention_dropout=0.0,
)


class Block(nn.Module):
    """A decoder layer that computes the rotary embedding itself, so that its only input is the hidden states."""

    def __init__(self, layer: LlamaDecoderLayer, rotary: LlamaRotaryEmbedding) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.layer(hidden, position_ids=positions, position_embeddings=self.rotary(hidden, positions))


def layers_of(model: LlamaForCausalLM) -> list[nn.Module]:
    """Return the modules of a Llama in the order in which they run."""
    llama = model.model
    return [llama.embed_tokens, *(Block(layer, llama.rotary_emb) for layer in llama.layers), llama.norm, model.lm_head]


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_batch(step: int) -> torch.Tensor:
    """Return the bytes of random pieces of text; the pieces are the same on all ranks."""
    with open(argparse.__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - SEQUENCE_LENGTH, (BATCH_SIZE,), generator=generator)
    return torch.stack([text[start : start + SEQUENCE_LENGTH] for start in starts])


def train_pipeline(pipeline: Pipeline) -> list[torch.Tensor]:
    """Train on all ranks; return the loss of each step."""
    optimizer, losses = torch.optim.AdamW(pipeline.parameters(), lr=3e-3), []
    for step in range(NUM_STEPS):
        tokens = make_batch(step)
        losses.append(pipeline.train_batch((tokens, tokens)))
        pipeline.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_in_one_process(model: LlamaForCausalLM) -> list[torch.Tensor]:
    """Train in one process under autograd, one microbatch after the other."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(NUM_STEPS):
        loss_of_step = torch.zeros(())
        for tokens in make_batch(step).chunk(NUM_MICROBATCHES):
            loss = next_token_loss(model(tokens, use_cache=False).logits, tokens) / NUM_MICROBATCHES
            loss.backward()
            loss_of_step += loss.detach()
        losses.append(loss_of_step)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    reference = copy.deepcopy(model)
    options = PipelineOptions(partition="type:block")
    pipeline = Pipeline(layers_of(model), next_token_loss, "zb-v", NUM_MICROBATCHES, options)

    losses, expected = train_pipeline(pipeline), train_in_one_process(reference)
    trained, of_reference = pipeline.full_state_dict(), nn.Sequential(*layers_of(reference)).state_dict()
    is_equal = torch.equal(torch.stack(losses), torch.stack(expected))
    is_equal &= all(torch.equal(trained[name], value) for name, value in of_reference.items())
    if dist.get_rank() == 0:
        print(pipeline.summary())
        print("losses", ", ".join(f"{loss:.4f}" for loss in losses))
        print("losses and parameters are", "equal to one process's, bit for bit" if is_equal else "DIFFERENT")
    pipeline.close()
    dist.destroy_process_group()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
