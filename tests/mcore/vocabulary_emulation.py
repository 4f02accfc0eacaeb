"""Computes a step of a GPT with vocabulary shards in one process, microbatch after microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron.zero_bubble.mcore.placement import chunk_groups
from megatron.zero_bubble.mcore.unit_seeds import initialized_by_unit
from megatron.zero_bubble.mcore.vocabulary_shard import Rows, add_embedding_gradient, combine, look_up, softmax
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.forward_step import loss_func
from megatron.zero_bubble.trainer.model import build_stage, transformer_config

NUM_SHARDS = 2


class EmulatedStep:
    """A GPT of two stages with learned positions, whose embedding and output layer are cut into two shards.

    It is built inside `initialized`, with the weights of a job's pipeline.

    Attributes:
        losses: the summed loss of every microbatch so far.
    """

    def __init__(self, args: Arguments) -> None:
        placement, is_tied = Placement("linear", 2), not args.untie_embeddings_and_output_weights
        args = replace(args, untie_embeddings_and_output_weights=True)
        config = transformer_config(args, 1, None)
        stages: list[Any] = []
        for stage in range(2):
            with initialized_by_unit(args.seed, is_first_stage=stage == 0):
                groups = chunk_groups(placement, stage, 0)
                stages.append(build_stage(args, config, groups, None, embeds=stage == 0, is_last=stage == 1))
        self._first, self._last = stages
        embedding = self._first.embedding.word_embeddings.weight
        output = embedding if is_tied else self._last.output_layer.weight
        # The last stage then ends with its hidden states.
        self._last.post_process = False
        self._embedding, self._output = embedding.detach().chunk(NUM_SHARDS), output.detach().chunk(NUM_SHARDS)
        size = len(self._embedding[0])
        self._rows = [Rows(shard * size, size) for shard in range(NUM_SHARDS)]
        self._embedding_gradients = [torch.zeros_like(shard) for shard in self._embedding]
        self._output_gradients = [torch.zeros_like(shard) for shard in self._output]
        self._is_tied = is_tied
        self.losses: list[float] = []

    def run(self, microbatches: Iterable[Mapping[str, torch.Tensor]]) -> None:
        microbatches = list(microbatches)
        for microbatch in microbatches:
            self._run(microbatch, len(microbatches))

    def _run(self, microbatch: Mapping[str, torch.Tensor], num_microbatches: int) -> None:
        tokens, positions = microbatch["tokens"], microbatch["position_ids"]
        looked_up = sum(look_up(*shard, tokens) for shard in zip(self._embedding, self._rows, strict=True))
        looked_up.requires_grad_()
        embedded = looked_up + self._first.embedding.position_embeddings(positions)
        between = self._first(None, positions, None, decoder_input=embedded.transpose(0, 1).contiguous())
        received = between.detach().requires_grad_()
        self._last.set_input_tensor([received])
        hidden = self._last(None, positions, None)

        flat = hidden.detach().flatten(0, 1)
        labels = microbatch["labels"].t().reshape(-1)
        made = [softmax(*shard, flat, labels) for shard in zip(self._output, self._rows, strict=True)]
        statistics = torch.stack([one.statistics for one in made])
        loss_gradient = self._loss(combine(statistics, 0)[0], microbatch, num_microbatches)
        alphas = [combine(statistics, shard)[1] for shard in range(NUM_SHARDS)]
        for total, one, alpha in zip(self._output_gradients, made, alphas, strict=True):
            total += one.logits_gradient(alpha, loss_gradient).t() @ flat
        terms = [one.take_input_gradient(alpha) for one, alpha in zip(made, alphas, strict=True)]
        hidden.backward((loss_gradient.unsqueeze(1) * (terms[0] + terms[1])).view_as(hidden))
        between.backward(received.grad)
        for total, rows in zip(self._embedding_gradients, self._rows, strict=True):
            add_embedding_gradient(total, rows, tokens, looked_up.grad)

    def _loss(
        self, losses: torch.Tensor, microbatch: Mapping[str, torch.Tensor], num_microbatches: int
    ) -> torch.Tensor:
        """Compute the loss of a microbatch, and return its gradient for every token."""
        leaf = losses.view(*microbatch["labels"].t().shape).t().contiguous().requires_grad_()
        loss, num_tokens, report = loss_func(microbatch["loss_mask"], leaf.clone())
        (loss / num_tokens.clamp(min=1) / num_microbatches).backward()
        self.losses.append(report["lm loss"][0].item())
        return leaf.grad.t().reshape(-1)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of all parameters, by the names of `vocabulary_training`."""
        embedding, output = torch.cat(self._embedding_gradients), torch.cat(self._output_gradients)
        found = {"embedding": output + embedding} if self._is_tied else {"embedding": embedding, "output": output}
        for model in (self._first, self._last):
            for name, parameter in model.named_parameters():
                if "word_embeddings" in name or "output_layer" in name:
                    continue
                match name.split("."):
                    case ["decoder", "layers", number, *rest]:
                        name = f"layer {model.decoder.layers[int(number)].layer_number} {'.'.join(rest)}"
                found[f"{name} of 0"] = parameter.grad
        return found
