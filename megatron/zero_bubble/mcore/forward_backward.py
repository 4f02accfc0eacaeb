"""Implements the executor's interface `Stage` with megatron-core's `forward_step` and `backward_step`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import schedules as mcore
from megatron.core.pipeline_parallel.utils import make_viewless
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.core.utils import get_model_type

from megatron.zero_bubble.mcore.checkpointed_blocks import split_checkpoints
from megatron.zero_bubble.mcore.fully_sharded import fully_sharded
from megatron.zero_bubble.mcore.multi_token import forget_losses
from megatron.zero_bubble.mcore.post_validation import PostValidation
from megatron.zero_bubble.mcore.recorded_call import ForwardStep, ForwardStepError
from megatron.zero_bubble.mcore.restart import Restart, RewindableIterator, make_rewindable
from megatron.zero_bubble.mcore.step_call import StepCall
from megatron.zero_bubble.mcore.vocabulary_stage import VocabularyStep
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.variable_shapes import AnnouncedSpec, AnswerSpec
from megatron.zero_bubble.schedule import Op, OpKind, Placement
from megatron.zero_bubble.schedule.kinds import KINDS

NoSync = Callable[[], contextlib.AbstractContextManager[Any]]

_TAKES_MODEL_TYPE = "model_type" in inspect.signature(mcore.backward_step).parameters
"""Whether `backward_step` takes the type of the model as an argument, as in megatron-core before 0.17."""


class GradSync:
    """Keeps all operations inside megatron-core's `no_sync`, except the operations of the last microbatch.

    DDP counts a parameter as ready when its gradient arrives outside of `no_sync`, which is a list of one function for
    each chunk, or one function for all. `no_sync` is entered or left before each operation, because the W of an early
    microbatch may run after the B of the last microbatch.
    """

    def __init__(self, no_sync: NoSync | list[NoSync] | None) -> None:
        self._no_sync = no_sync if isinstance(no_sync, list) else [no_sync or contextlib.nullcontext]
        self._entered: dict[int, contextlib.AbstractContextManager[Any]] = {}

    def enable(self, chunk: int, enabled: bool) -> None:
        """Leave `no_sync` of `chunk` if `enabled`, so that DDP counts the gradients as ready; else enter `no_sync`."""
        chunk = chunk if len(self._no_sync) > 1 else 0
        if enabled and chunk in self._entered:
            self._entered.pop(chunk).__exit__(None, None, None)
        elif not enabled and chunk not in self._entered:
            self._entered[chunk] = self._no_sync[chunk]()
            self._entered[chunk].__enter__()

    def enable_all(self) -> None:
        for chunk in list(self._entered):
            self.enable(chunk, True)


@dataclass
class MegatronStage:
    """The computation of one rank in one call of the forward-backward function.

    Attributes:
        call: the arguments of the forward-backward function.
        data_iterators: for each model chunk, an iterator over the microbatches in their planned order; None for a chunk
            that needs no data.
        shapes_vary: whether the tensors between stages vary in shape, so that headers announce the shapes.
        forward_data_store: on the last stage, the result of the loss function for each microbatch.
        num_tokens: sum of the token counts that the loss function returned.
        finalizes: whether to reduce the gradients of this rank at the end of the step.
        post_validation: takes the optimizer's step within the schedule; None if the step comes after the schedule.
        num_early_forwards: number of operations such as F and R, over all ranks, that run before the previous
            iteration's optimizer step is validated.
        recomputation_store: the executor's `RecomputationStore`; None if the schedule has no R, so that only B can
            recompute.
        vocabulary: the operations on this rank's vocabulary shard; None if the model's vocabulary is not sharded.
    """

    call: StepCall
    data_iterators: Sequence[Iterator[Any] | None]
    placement: Placement
    rank: int
    device: torch.device
    forward_data_store: list[Any] = field(default_factory=list)
    finalizes: bool = True
    post_validation: PostValidation | None = None
    num_early_forwards: int = 0
    recomputation_store: RecomputationStore | None = None
    vocabulary: VocabularyStep | None = None
    shapes_vary: bool = False

    def __post_init__(self) -> None:
        self._config = self.call.config
        self._grad_sync = GradSync(self._config.no_sync_func)
        self.num_tokens = torch.zeros([], dtype=torch.int, device=self.device)
        self._sent: dict[tuple[int, int], TensorSpec] = {}
        self._restart: Restart | None = None
        self._rewindable: list[RewindableIterator] = []
        if self.post_validation is not None and self.post_validation.is_pending:
            self._prepare_restart()

    def _prepare_restart(self) -> None:
        """Save random states, buffers and data, so that forwards can run again after an amended optimizer step."""
        self._restart = Restart(self.call.chunks)
        self.data_iterators, self._rewindable = make_rewindable(self.data_iterators)

    def forward(self, microbatch: int, chunk: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        stage = self.placement.stage_of(self.rank, chunk)
        is_last = stage == self.placement.num_stages - 1
        with split_checkpoints(self.recomputation_store):
            output, num_tokens = mcore.forward_step(
                self._forward_step(microbatch, chunk),
                self.data_iterators[chunk],
                self.call.chunks[chunk],
                self.call.num_microbatches,
                input_tensor,
                self.forward_data_store,
                self._config,
                self.call.groups.cp.size(),
                self.call.collect_non_loss_data,
                is_first_microbatch=self._is_first(microbatch),
                current_microbatch=microbatch,
                vp_stage=self._vp_stage(chunk),
                # With vocabulary shards, the loss is a separate operation.
                is_last_stage=is_last and self.vocabulary is None,
            )
        self._note_output(microbatch, chunk, output, num_tokens)
        if not is_last:
            # A hybrid model that has only the embedding returns a view, which megatron-core refuses to free.
            return make_viewless(output)
        if self.vocabulary is not None:
            output = self.vocabulary.end_last_stage(microbatch)
            if not self.call.forward_only:
                self.release_output(output)
        return output

    def _note_output(self, microbatch: int, chunk: int, output: Any, num_tokens: torch.Tensor) -> None:
        """Add a forward's token count to the step's sum, and check the forward's message to the next stage."""
        self.num_tokens += num_tokens
        stage = self.placement.stage_of(self.rank, chunk)
        if stage == self.placement.num_stages - 1:
            return
        self._check_message(stage, output)
        if self.shapes_vary:
            self._sent[chunk, microbatch] = TensorSpec(tuple(output.shape), output.dtype, output.device)

    def _check_message(self, stage: int, output: Any) -> None:
        """Raise `ForwardStepError` if an output is not one tensor of the shape and type that the next stage expects."""
        if not isinstance(output, torch.Tensor):
            raise ForwardStepError(f"stage {stage} sends a {type(output).__name__}, but messages are one tensor each")
        if not self.shapes_vary and tuple(output.shape) != self.call.output_shape:
            raise ForwardStepError(
                f"stage {stage} sends a tensor of shape {tuple(output.shape)}, but messages have "
                f"{self.call.output_shape}, as the model's configuration says: config.variable_seq_lengths = True "
                "allows messages of any shape"
            )
        # A stage that is measured alone does not reduce gradients, and sends its output to no other stage.
        if self.finalizes and output.dtype != self._config.pipeline_dtype:
            problem = f"stage {stage} sends a tensor of {output.dtype}, but messages have the type"
            raise ForwardStepError(f"{problem} config.pipeline_dtype, {self._config.pipeline_dtype}")

    def _forward_step(self, microbatch: int, chunk: int) -> ForwardStep:
        """Return the forward step of a microbatch on one of this rank's chunks.

        The forward step is the user's forward step, except on the first and the last stage of a model with vocabulary
        shards. For these two stages, the `VocabularyStep` provides the forward step.
        """
        stage = self.placement.stage_of(self.rank, chunk)
        if self.vocabulary is not None and stage == 0:
            return partial(self.vocabulary.forward_first_stage, microbatch)
        if self.vocabulary is not None and stage == self.placement.num_stages - 1:
            return partial(self.vocabulary.forward_last_stage, microbatch, self.call.forward_step_func)
        return self.call.forward_step_func

    def _is_first(self, microbatch: int) -> bool:
        return mcore.check_first_val_step(self.call.first_val_step, self.call.forward_only, microbatch == 0)

    def _vp_stage(self, chunk: int) -> int | None:
        return chunk if self.placement.num_chunks > 1 else None

    def backward(
        self,
        microbatch: int,
        chunk: int,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        if self.vocabulary is not None and output_grad is None:
            output_grad = self.vocabulary.gradient_of_last_stage(microbatch)
        return self._backward_step(input_tensor, output_tensor, output_grad)

    def _backward_step(
        self, input_tensor: torch.Tensor | None, output_tensor: torch.Tensor, output_grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        model_type = (get_model_type(self.call.chunks[0]),) if _TAKES_MODEL_TYPE else ()
        return mcore.backward_step(input_tensor, output_tensor, output_grad, *model_type, self._config)

    def run_on_shard(self, op: Op) -> None:
        assert self.vocabulary is not None
        handlers: dict[OpKind, Callable[[int], None]] = {
            OpKind.E: partial(self._embed, self.vocabulary),
            OpKind.EW: self.vocabulary.add_embedding_gradient,
            OpKind.S: self.vocabulary.compute_softmax,
            OpKind.L: partial(self._compute_loss, self.vocabulary),
            OpKind.T: self.vocabulary.add_output_gradient,
        }
        handlers[op.kind](op.microbatch)

    def exchange(self, op: Op) -> None:
        assert self.vocabulary is not None
        self.vocabulary.exchange(op)

    def _embed(self, vocabulary: VocabularyStep, microbatch: int) -> None:
        """On the first stage's rank, read a microbatch's data; on every rank, run the embedding E."""
        if self.rank == self.placement.rank_of(0):
            chunk = self.placement.chunk_of(0)
            iterator, model = self.data_iterators[chunk], self.call.chunks[chunk]
            vocabulary.read(microbatch, self.call.forward_step_func, iterator, model)
        vocabulary.embed(microbatch)

    def _compute_loss(self, vocabulary: VocabularyStep, microbatch: int) -> None:
        """Run L: compute the user's loss, and the gradient of this loss with respect to the losses of all tokens."""
        chunk = self.placement.chunk_of(self.placement.num_stages - 1)
        losses, loss_function = vocabulary.begin_loss(microbatch)
        if self._config.timers is not None:
            self._config.timers("forward-compute", log_level=2).start()
        # A loss function may change its input in place.
        loss, num_tokens = self._calc_loss(chunk, losses.clone(), loss_function, is_last=True)
        self.num_tokens += num_tokens
        if not self.call.forward_only:
            vocabulary.end_loss(microbatch, self._backward_step(losses, loss, None))

    def _calc_loss(
        self, chunk: int, output: torch.Tensor, loss_function: Callable[..., Any] | None, *, is_last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a pair (result, number of tokens); the result is the loss on the last stage, `output` elsewhere."""
        return mcore.forward_step_calc_loss(
            self.call.chunks[chunk],
            output,
            loss_function,
            self._config,
            self._vp_stage(chunk),
            self.call.collect_non_loss_data,
            self.call.num_microbatches,
            self.forward_data_store,
            self.call.groups.cp.size(),
            is_last,
        )

    def release_output(self, output_tensor: torch.Tensor) -> None:
        mcore.deallocate_output_tensor(output_tensor, self._config.deallocate_pipeline_outputs)

    def before_inputs(self, op: Op) -> None:
        for chunk in fully_sharded(self.call.chunks[op.chunk : op.chunk + 1]):
            chunk.gather_ahead(is_forward=op.kind is OpKind.F)

    def before_gradients(self, op: Op) -> None:
        self._grad_sync.enable(op.chunk, op.microbatch == self.call.num_microbatches - 1)
        for chunk in fully_sharded(self.call.chunks[op.chunk : op.chunk + 1]):
            chunk.before_gradients(is_fused=OpKind.W in KINDS[op.kind].makes)

    def message_spec(self, op: Op) -> TensorSpec:
        """Return the spec of a received message; unless `shapes_vary` is set, all messages have the same shape."""
        if not self.shapes_vary:
            return self.usual_message
        spec: AnnouncedSpec | AnswerSpec = AnnouncedSpec(self.usual_message.dtype, self.device)
        if op.kind is OpKind.RECV_BACKWARD:
            spec = AnswerSpec(partial(self._sent.get, (op.chunk, op.microbatch)))
        # A stage whose shapes vary runs with a `VariableCommunicator`, which takes tensors of any shape.
        return cast(TensorSpec, spec)

    @property
    def usual_message(self) -> TensorSpec:
        """Shape, type and device of a message, for the sequence length and microbatch size in the step's arguments."""
        return TensorSpec(self.call.output_shape, self._config.pipeline_dtype, self.device)

    def finish(self) -> None:
        """Leave `no_sync`; if `finalizes` is set, reduce the gradients."""
        self._grad_sync.enable_all()
        if self.finalizes:
            self.call.finalize(self.placement, self.num_tokens)
        self.leave()

    def leave(self) -> None:
        """Leave `no_sync`, as DDP expects between steps, and free gathered parameters, at the end of any step."""
        self._grad_sync.enable_all()
        for chunk in fully_sharded(self.call.chunks):
            chunk.free_gathered()

    def step(self) -> None:
        assert self.post_validation is not None
        self.finish()
        self.post_validation.step()

    def validate(self) -> bool:
        assert self.post_validation is not None
        was_wrong = self.post_validation.validate(self.num_early_forwards)
        if not was_wrong:
            self._restart = None
            for iterator in self._rewindable:
                iterator.forget()
        return was_wrong

    def restart(self) -> None:
        assert self._restart is not None
        self._restart.apply()
        for iterator in self._rewindable:
            iterator.rewind()
        self.forward_data_store.clear()
        self.num_tokens.zero_()
        if self.vocabulary is not None:
            self.vocabulary.restart()
        forget_losses()
        clear_aux_losses_tracker()
