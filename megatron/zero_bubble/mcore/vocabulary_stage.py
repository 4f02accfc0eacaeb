"""Runs a step's operations on one rank's vocabulary shard, and the rank's part in the collectives between shards.

`VocabularyStep` keeps the intermediate results of each microbatch between operations. `MegatronStage` calls
`VocabularyStep` between the forwards and backwards of megatron-core.

The collectives run beside the computation, in a CUDA stream or a thread. On a GPU, collectives and computation use two
streams. Memory that one stream frees must not be reused while the other stream still reads this memory. The memory of a
tensor that a collective creates is not reused too early, because each collective waits for all earlier computation.
Tensors that a collective reads are kept until this rank has waited for a later collective, or are marked by
`record_stream`. The rank that broadcasts a tensor does not wait for the broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.mcore.recorded_call import ForwardStep, ForwardStepError, RecordedCall, record_call
from megatron.zero_bubble.mcore.vocabulary_run import VocabularyRun, made_up_collectives
from megatron.zero_bubble.mcore.vocabulary_shard import ShardSoftmax, ShardWeight, combine, look_up, softmax
from megatron.zero_bubble.schedule import Op, OpKind

_FLAG = "--zero-bubble-vocabulary-parallel"


@dataclass
class _Microbatch:
    """The intermediate results of one microbatch that operations on a vocabulary shard pass to each other.

    In shapes, n is the number of tokens, batch times sequence; the tokens are in the order [sequence, batch].
    """

    outgoing: dict[OpKind, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Kind of collective -> tensors that this rank broadcasts. `outgoing` keeps the tensors until the broadcast
    runs, because this rank's operations may drop their own references to the tensors earlier."""
    call: RecordedCall | None = None
    """The first stage's call of the model, which the embedding E records before F runs; None once F runs."""
    loss_function: Callable[..., Any] | None = None
    tokens: torch.Tensor | None = None
    """Token numbers, [batch, sequence]."""
    looked_up: torch.Tensor | None = None
    """Embeddings that were looked up in this shard, [batch, sequence, hidden]. On the first stage's rank, the
    collective `OpKind.EMBEDDED` replaces the embeddings by the sum of all pipeline ranks' embeddings."""
    embedding_gradient: torch.Tensor | None = None
    """Gradient with respect to the embedded tokens of the first stage, [batch, sequence, hidden]."""
    hidden: torch.Tensor | None = None
    """Output of the last stage, [sequence, batch, hidden]; with sequence parallelism, a part of the sequence."""
    labels: torch.Tensor | None = None
    """Token numbers of the labels, [batch, sequence]."""
    softmax: ShardSoftmax | None = None
    losses: torch.Tensor | None = None
    """Loss of every token, [n]."""
    alpha: torch.Tensor | None = None
    """Share of this rank's vocabulary shard in the denominator of each token's softmax, [n]."""
    input_gradient: torch.Tensor | None = None
    """Gradient of the sum of all tokens' losses with respect to the last stage's output, [n, hidden]; only on the last
    stage's rank."""
    loss_gradient: torch.Tensor | None = None
    """Gradient of the training loss with respect to the loss of every token, [n]."""


class _KeptGradient(torch.autograd.Function):
    """Returns embeddings unchanged in the forward; keeps the embeddings' gradient in the backward, for EW."""

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, looked_up: torch.Tensor, state: _Microbatch) -> torch.Tensor:
        ctx.state = state
        return looked_up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.state.embedding_gradient = gradient = gradient.contiguous()
        ctx.state.outgoing[OpKind.EMBEDDED_GRAD] = (gradient,)
        return None, None, None


class VocabularyStep:
    """The operations of one step on a vocabulary shard.

    Args:
        message_shape: shape [sequence, batch, hidden] of the messages between stages.
        forward_only: whether the step has no backward, and therefore skips tensors that are used only for gradients.

    Raises:
        ValueError: the step has a backward, but the training loop has frozen the shard.
    """

    def __init__(
        self, run: VocabularyRun, num_microbatches: int, message_shape: tuple[int, ...], *, forward_only: bool
    ) -> None:
        self._run, self._shard, self._pipeline = run, run.shard, run.collectives.pipeline
        self._num_microbatches, self._forward_only = num_microbatches, forward_only
        if not forward_only and not all(weight.weight.requires_grad for weight in run.shard.weights):
            raise ValueError(
                f"{_FLAG}: the training loop has frozen a shard of the vocabulary after the model was built: give "
                f"{_FLAG} off"
            )
        sequence, batch, _ = message_shape
        self._hidden_shape = message_shape
        self._sequence = sequence * (run.tensor_group.size() if run.is_sequence_parallel else 1)
        self._token_shape = batch, self._sequence
        self.restart()

    def rehearsal(self, num_microbatches: int) -> VocabularyStep:
        """Return a `VocabularyStep` for the warm-up; its collectives yield made-up tensors and do not communicate."""
        run = replace(self._run, collectives=made_up_collectives(self._run.collectives))
        return VocabularyStep(run, num_microbatches, self._hidden_shape, forward_only=self._forward_only)

    def restart(self) -> None:
        """Drop the results of all microbatches, before the forwards run again; no collective may be running."""
        self._microbatches = [_Microbatch() for _ in range(self._num_microbatches)]

    def kept_bytes(self, microbatch: int) -> int:
        """Return the bytes that a microbatch's softmax S keeps for T, the weight gradient of the output layer."""
        kept = self._microbatches[microbatch].softmax
        return 0 if kept is None else kept.nbytes

    def held_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that operations and collectives have stored for later operations and collectives."""
        for state in self._microbatches:
            parts = {**vars(state), **(vars(state.softmax) if state.softmax else {})}
            yield from (part for part in parts.values() if isinstance(part, torch.Tensor))
            yield from chain.from_iterable(state.outgoing.values())

    @torch.no_grad()
    def exchange(self, op: Op) -> None:
        """Run this rank's part of the collective `op`; called on the stream or thread that runs all collectives."""
        state, run = self._microbatches[op.microbatch], self._run
        if op.kind is OpKind.EMBEDDED:
            self._pipeline.sum_to(_there(state.looked_up), run.first_rank)
        elif op.kind is OpKind.SOFTMAX:
            self._exchange_softmax(state)
        else:
            root = run.first_rank if op.kind in (OpKind.TOKENS, OpKind.EMBEDDED_GRAD) else run.last_rank
            tensors = state.outgoing.pop(op.kind, None) or self._allocate_received(op.kind, state)
            for tensor in tensors:
                self._pipeline.broadcast(tensor, root)
            _mark_as_read(*tensors)

    def _allocate_received(self, kind: OpKind, state: _Microbatch) -> tuple[torch.Tensor, ...]:
        """Allocate the tensors that this rank receives in a broadcast, and store the tensors in `state`."""
        weight = self._shard.embedding.weight
        if kind is OpKind.TOKENS:
            state.tokens = weight.new_empty(self._token_shape, dtype=torch.int64)
            return (state.tokens,)
        if kind is OpKind.EMBEDDED_GRAD:
            state.embedding_gradient = weight.new_empty(*self._token_shape, weight.shape[1])
            return (state.embedding_gradient,)
        if kind is OpKind.HIDDEN:
            state.hidden = self._shard.output.weight.new_empty(self._hidden_shape)
            state.labels = weight.new_empty(self._token_shape, dtype=torch.int64)
            return state.hidden, state.labels
        state.loss_gradient = torch.empty_like(_there(state.alpha))
        return (state.loss_gradient,)

    # ---- Methods for the embedding

    def read(
        self, microbatch: int, forward_step: ForwardStep, data_iterator: Iterator[Any] | None, model: torch.nn.Module
    ) -> None:
        """Run the first rank's part of the embedding E: the first stage's forward step up to the call of the model."""
        state = self._microbatches[microbatch]
        state.call = record_call(forward_step, data_iterator, model, _FLAG)
        tokens = state.call.tokens
        if tokens is None or tuple(tokens.shape) != self._token_shape:
            shape = "no tokens" if tokens is None else f"tokens of shape {tuple(tokens.shape)}"
            raise ForwardStepError(
                f"the forward step gave the model {shape}, but {_FLAG} needs {self._token_shape}, [batch, sequence]"
            )
        state.tokens = tokens.long().contiguous()
        state.outgoing[OpKind.TOKENS] = (state.tokens,)

    @torch.no_grad()
    def embed(self, microbatch: int) -> None:
        """Run E: look up a microbatch's tokens in this shard."""
        state = self._microbatches[microbatch]
        weight = self._shard.embedding()
        state.looked_up = look_up(weight, self._shard.embedding.rows, _there(state.tokens))

    def forward_first_stage(self, microbatch: int, data_iterator: Any, model: torch.nn.Module) -> tuple[Any, Any]:
        """Run the first stage's forward step up to its end, with the embeddings that E has looked up."""
        state, layer = self._microbatches[microbatch], self._run.embedding_layer
        assert layer is not None
        layer.looked_up = _there(state.looked_up)
        if not self._forward_only:
            trigger = torch.empty((), device=layer.looked_up.device, requires_grad=True)
            layer.looked_up = _KeptGradient.apply(trigger, layer.looked_up, state)
        call, state.call, state.looked_up = _there(state.call), None, None
        result: tuple[Any, Any] = call.forward_step(data_iterator, model)
        if layer.looked_up is not None:
            raise ForwardStepError(f"the forward step gives the model decoder_input: give {_FLAG} off")
        return result

    @torch.no_grad()
    def add_embedding_gradient(self, microbatch: int) -> None:
        """Run EW: add a microbatch's gradient to the gradient of this shard's embedding."""
        state = self._microbatches[microbatch]
        self._shard.embedding.add_embedding_gradient(_there(state.tokens), _there(state.embedding_gradient))
        state.tokens = state.embedding_gradient = None
        self._complete_with_last(microbatch, self._shard.embedding)

    # ---- Methods for the output layer

    def forward_last_stage(
        self, microbatch: int, forward_step: ForwardStep, data_iterator: Iterator[Any] | None, model: torch.nn.Module
    ) -> tuple[Any, Any]:
        """Run the forward step of the last stage, and keep the returned loss function for the loss operation L."""
        call = record_call(forward_step, data_iterator, model, _FLAG)
        if call.keywords.get("output_processor") is not None:
            raise ForwardStepError(f"{_FLAG} computes the loss itself: the forward step may give no output_processor")
        self._microbatches[microbatch].loss_function = call.loss_function
        return call.forward_step(data_iterator, model)

    def end_last_stage(self, microbatch: int) -> torch.Tensor:
        """Keep the last stage's output for the softmax S; return the output with its autograd graph, for B."""
        state, layer = self._microbatches[microbatch], self._run.output_layer
        assert layer is not None
        if layer.loss_inputs is None:
            raise ForwardStepError(
                f"{_FLAG} computes losses, not logits: the forward step must call the model with labels"
            )
        (hidden, labels), layer.loss_inputs = layer.loss_inputs, None
        # Cloned, because a last stage without layers returns its input, whose memory B needs.
        output = hidden.clone() if hidden.is_leaf and hidden.requires_grad else hidden
        state.hidden, state.labels = output.detach(), labels.long().contiguous()
        state.outgoing[OpKind.HIDDEN] = state.hidden, state.labels
        return output

    @torch.no_grad()
    def compute_softmax(self, microbatch: int) -> None:
        """Run S: compute the softmax on this shard."""
        state, output = self._microbatches[microbatch], self._shard.output
        labels = _there(state.labels).t().reshape(-1)
        hidden = self._whole_hidden(state)
        state.softmax = softmax(output(), output.rows, hidden, labels, with_gradients=not self._forward_only)
        if self._forward_only:
            state.hidden = state.tokens = None
        if self._pipeline.rank != self._run.first_rank:
            state.looked_up = None

    def _whole_hidden(self, state: _Microbatch) -> torch.Tensor:
        """Return the hidden states of all tokens, [n, hidden]; sequence parallelism requires a gather in each call."""
        hidden = _there(state.hidden)
        if self._run.is_sequence_parallel:
            whole = hidden.new_empty(self._sequence, *hidden.shape[1:])
            dist.all_gather_into_tensor(whole, hidden.contiguous(), group=self._run.tensor_group)
            hidden = whole
        return hidden.reshape(-1, hidden.shape[-1])

    def _exchange_softmax(self, state: _Microbatch) -> None:
        result, run = _there(state.softmax), self._run
        statistics = run.collectives.gather_statistics(result.statistics)
        state.losses, state.alpha = combine(statistics, self._shard.index)
        if self._forward_only:
            return
        _mark_as_read(result.product, result.label_weights)
        terms = result.take_input_gradient(state.alpha)
        total = run.collectives.sum_to(terms, run.last_rank, splits_sequence=run.is_sequence_parallel)
        if self._pipeline.rank == run.last_rank:
            state.input_gradient = total

    def begin_loss(self, microbatch: int) -> tuple[torch.Tensor, Callable[..., Any] | None]:
        """Return the inputs of L: all tokens' losses as a leaf tensor, [batch, sequence], and the loss function."""
        state = self._microbatches[microbatch]
        batch, sequence = self._token_shape
        losses = _there(state.losses).view(sequence, batch).t().contiguous()
        return losses.requires_grad_(not self._forward_only), state.loss_function

    def end_loss(self, microbatch: int, gradient: torch.Tensor | None) -> None:
        """Keep the gradient of the training loss with respect to all tokens' losses; None stands for zeros."""
        state = self._microbatches[microbatch]
        losses = _there(state.losses)
        state.loss_gradient = (
            torch.zeros_like(losses) if gradient is None else gradient.t().reshape(-1).to(losses.dtype)
        )
        state.outgoing[OpKind.LOSS_GRAD] = (state.loss_gradient,)

    @torch.no_grad()
    def gradient_of_last_stage(self, microbatch: int) -> torch.Tensor:
        """Return the gradient of the last stage's output, with which B of the last stage begins."""
        state = self._microbatches[microbatch]
        loss_gradient, total = _there(state.loss_gradient), _there(state.input_gradient)
        state.input_gradient = None
        if self._run.is_sequence_parallel:
            group = self._run.tensor_group
            loss_gradient = loss_gradient.chunk(group.size())[group.rank()]
        gradient = total.mul_(loss_gradient.unsqueeze(1))
        return gradient.to(self._shard.output.weight.dtype).view(self._hidden_shape)

    @torch.no_grad()
    def add_output_gradient(self, microbatch: int) -> None:
        """Run T: add a microbatch's gradient to the gradient of this shard's output layer."""
        state, output = self._microbatches[microbatch], self._shard.output
        gradient = _there(state.softmax).logits_gradient(_there(state.alpha), _there(state.loss_gradient))
        state.softmax = None
        output.add_output_gradient(gradient, self._whole_hidden(state), is_fused=self._run.is_fused)
        state.hidden = state.labels = None
        self._complete_with_last(microbatch, output)

    def _complete_with_last(self, microbatch: int, weight: ShardWeight) -> None:
        if microbatch == self._num_microbatches - 1:
            weight.complete()


def _there(value: Any) -> Any:
    assert value is not None, "an operation on a vocabulary shard before its input is there"
    return value


def _mark_as_read(*tensors: torch.Tensor | None) -> None:
    """Keep the memory of tensors until the current stream has read them; on a CPU, do nothing."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())
