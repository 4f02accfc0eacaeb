"""Runs schedules: an `Executor` runs the operations of one rank in the order of a schedule.

The executor does not depend on the model: a `Stage` computes F and B, and the schedule determines when F and B run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch

from megatron.zero_bubble.runtime.communicator import Communicator
from megatron.zero_bubble.runtime.copy_lane import ThreadLink
from megatron.zero_bubble.runtime.exchange_lane import ExchangeLane, Exchanges
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.recorder import OpRecorder
from megatron.zero_bubble.runtime.stage import Stage, SteppingStage, VocabularyStage
from megatron.zero_bubble.runtime.stage_messages import StageMessages
from megatron.zero_bubble.runtime.steps import Range, Step, StepProgress, new_range, no_range, steps_of
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind, Schedule
from megatron.zero_bubble.schedule.kinds import BACKWARDS, COLLECTIVES, KINDS, VOCABULARY
from megatron.zero_bubble.schedule.pairs import computations
from megatron.zero_bubble.schedule.step_ops import before_validation, stale_receives
from megatron.zero_bubble.schedule.tail import run_together


class LeftoverError(RuntimeError):
    """Raised if a bug in a schedule or the runtime leaves a message, an activation or a W unused after a step."""


class Executor:
    """Runs the operations of one rank, from a schedule that contains sends and receives.

    Args:
        schedule: a lowered schedule (see `schedule.lower`), which is valid (see `schedule.validate`).
        rank: this process's pipeline rank.
        communicator: the channels to the neighboring ranks.
        weight_grad_store: holds the weight gradients that B defers.
        recomputation_store: holds the forwards that recomputation (R) repeats; needed if the schedule has R.
        tail_by_parameter: whether the weight gradients at the end of a step are computed parameter by parameter (see
            `schedule.tail`).
        offload_store: holds the activations that are copied to the host (D) and back (H); needed if the schedule has D.
        exchange_lane: runs collectives; needed for a schedule with operations on vocabulary shards.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        communicator: Communicator,
        weight_grad_store: WeightGradStore,
        recomputation_store: RecomputationStore | None = None,
        *,
        tail_by_parameter: bool = False,
        offload_store: OffloadStore | None = None,
        exchange_lane: ExchangeLane | None = None,
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self._messages = StageMessages(schedule, rank, communicator)
        self._store = weight_grad_store
        self._recomputation = recomputation_store or RecomputationStore()
        self._recomputation.weights = weight_grad_store
        self._recomputed = self._passed_by(OpKind.R)
        # Without offload (D) in the schedule, the OffloadStore stays empty.
        self._offload = offload_store or OffloadStore(ThreadLink())
        self._offloaded = self._passed_by(OpKind.D)
        assert offload_store is not None or not self._offloaded, "a schedule with D needs an OffloadStore"
        ops = schedule.ops[rank]
        self._steps = steps_of(run_together(ops) if tail_by_parameter else computations(ops))
        self._redone = steps_of(computations(before_validation(schedule, rank)))
        self._progress = StepProgress(self._steps, len(ops))
        self._stale = stale_receives(schedule, rank)
        self._runs_backward = any(op.kind in BACKWARDS for op in ops)
        groups = schedule.groups if self._runs_backward else ()
        self._groups = [groups[stage] if groups else 1 for stage in schedule.placement.stages_of(rank)]
        self._activations: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._exchanges = Exchanges(schedule, rank, exchange_lane)
        self._recorder: OpRecorder | None = None
        self._range: Range = no_range
        self._handlers: dict[OpKind, Callable[..., None]] = {
            OpKind.F: self._forward,
            OpKind.B: self._backward_input,
            OpKind.W: self._backward_weight,
            OpKind.BW: self._backward,
            OpKind.PB: self._pair,
            OpKind.PBW: self._pair,
            OpKind.R: self._recompute,
            OpKind.D: self._copy_out,
            OpKind.H: self._copy_back,
            OpKind.SEND_FORWARD: self._send,
            OpKind.SEND_BACKWARD: self._send,
            OpKind.RECV_FORWARD: self._messages.receive,
            OpKind.RECV_BACKWARD: self._messages.receive,
            OpKind.STEP: self._step,
            OpKind.VALIDATE: self._validate,
            **dict.fromkeys(VOCABULARY, self._on_shard),
            **dict.fromkeys(COLLECTIVES, self._exchange),
        }

    def _passed_by(self, kind: OpKind) -> frozenset[tuple[int, int]]:
        """Return (chunk, microbatch) of each operation of kind `kind` on this rank."""
        return frozenset((op.chunk, op.microbatch) for op in self.schedule.ops[self.rank] if op.kind is kind)

    def run(self, stage: Stage, recorder: OpRecorder | None = None) -> None:
        """Run all operations of one step; `recorder` records when each operation computes.

        If the step fails, the executor and its stores keep nothing of the step. With several ranks, messages of the
        failed step may still be in the channels.

        Raises:
            LeftoverError: a W, a message, an activation or the result of a collective is unused at the end of the step.
        """
        self._recorder = recorder
        self._recomputation.timed = nullcontext if recorder is None or max(self._groups) == 1 else recorder.timed_within
        self._range = new_range()
        self._progress.start(recorder)
        try:
            self._run(stage, self._steps)
            self._progress.position = len(self.schedule.ops[self.rank])
            self._messages.finish_sends()
            self._check_nothing_left(self._exchanges.finish())
        except BaseException as error:
            # If a collective has failed on this rank, that failure has caused `error`: the other ranks ended, and so
            # this rank's messages failed.
            cause = self._exchanges.forget()
            self._messages.forget()
            self._drop_results()
            if cause is None or cause is error or not isinstance(error, Exception):
                raise
            raise cause from error
        finally:
            if recorder is not None:
                recorder.close()

    def _drop_results(self) -> None:
        """Drop all results that later operations of the step would use: the step has failed or starts again."""
        self._activations.clear()
        self._store.clear()
        self._recomputation.clear()
        self._offload.clear()

    def _run(self, stage: Stage, steps: Sequence[Step]) -> None:
        for position, ops, name, is_computation in steps:
            self._progress.position = position
            with self._range(name):
                self._handlers[ops[-1].kind](stage, *ops)
            if self._recorder is not None and is_computation:
                self._recorder.end(*ops)
            self._messages.drop_finished_sends()

    def position(self) -> tuple[int, bool]:
        """Return the index of the current operation, and whether the inputs of this operation have arrived."""
        return self._progress.reached()

    def _forward(self, stage: Stage, op: Op) -> None:
        input_tensor = self._input_of_forward(stage, op)
        self._begin(op)
        recomputing: AbstractContextManager[None] = nullcontext()
        if self._runs_backward:
            drops, groups = (op.chunk, op.microbatch) in self._recomputed, self._groups[op.chunk]
            recomputing = self._recomputation.forward(op.chunk, op.microbatch, drops=drops, num_groups=groups)
        offloading: AbstractContextManager[None] = nullcontext()
        if (op.chunk, op.microbatch) in self._offloaded:
            # Between stages of plain PyTorch layers, one message may contain several tensors.
            kept = getattr(input_tensor, "tensors", (input_tensor,))
            offloading = self._offload.forward(op.chunk, op.microbatch, kept)
        with offloading, recomputing:
            output = stage.forward(op.microbatch, op.chunk, input_tensor)
        self._end_forward(stage, op, input_tensor, output)

    def _input_of_forward(self, stage: Stage, op: Op) -> torch.Tensor | None:
        """Wait for the input of a forward, and return the input; return None on the first stage."""
        stage.before_inputs(op)
        input_tensor = self._messages.input_of(op, is_forward=True)
        if input_tensor is not None and self._runs_backward:
            input_tensor.requires_grad_()
        self._exchanges.wait_before(op)
        return input_tensor

    def _end_forward(self, stage: Stage, op: Op, input_tensor: torch.Tensor | None, output: torch.Tensor) -> None:
        """Keep the tensors of a forward for its backward, and pass the output to the next stage."""
        if self._runs_backward:
            self._activations[op.chunk, op.microbatch] = (input_tensor, output)
        if self._messages.hand_on(op, output, is_forward=True):
            stage.release_output(output)

    def _pair(self, stage: Stage, forward: Op, backward: Op) -> None:
        """Run a forward and a backward as one operation, or in sequence if the stage has no `forward_backward`."""
        input_tensor = self._input_of_forward(stage, forward)
        inputs = self._backward_inputs(stage, backward)
        self._begin(forward)
        as_one = getattr(stage, "forward_backward", None)
        output = None if as_one else stage.forward(forward.microbatch, forward.chunk, input_tensor)
        stage.before_gradients(backward)
        defers = backward.kind is OpKind.PB
        with self._store.deferring() if defers else nullcontext():
            if as_one is not None:
                output, input_grad = as_one(forward, input_tensor, backward, *inputs)
            else:
                input_grad = stage.backward(backward.microbatch, backward.chunk, *inputs)
        if defers:
            self._store.flush(backward.chunk, backward.microbatch)
        assert output is not None
        self._end_forward(stage, forward, input_tensor, output)
        del self._activations[backward.chunk, backward.microbatch]
        self._messages.hand_on(backward, input_grad, is_forward=False)

    def _on_shard(self, stage: Stage, op: Op) -> None:
        self._exchanges.wait_before(op)
        self._begin(op)
        if KINDS[op.kind].adds_gradient:
            stage.before_gradients(op)
        cast(VocabularyStage, stage).run_on_shard(op)

    def _exchange(self, stage: Stage, op: Op) -> None:
        self._exchanges.start(op, partial(cast(VocabularyStage, stage).exchange, op))

    def _recompute(self, stage: Stage, op: Op) -> None:
        self._begin(op)
        self._recomputation.recompute(op.chunk, op.microbatch)

    def _copy_out(self, stage: Stage, op: Op) -> None:
        self._offload.wait(op.chunk, op.microbatch)
        self._begin(op)
        self._offload.release(op.chunk, op.microbatch)

    def _copy_back(self, stage: Stage, op: Op) -> None:
        self._begin(op)
        self._offload.bring_back(op.chunk, op.microbatch)

    def _backward(self, stage: Stage, op: Op) -> None:
        inputs = self._backward_inputs(stage, op)
        del self._activations[op.chunk, op.microbatch]
        self._begin(op)
        stage.before_gradients(op)
        input_grad = stage.backward(op.microbatch, op.chunk, *inputs)
        self._offload.forget(op.chunk, op.microbatch)
        self._messages.hand_on(op, input_grad, is_forward=False)

    def _backward_inputs(self, stage: Stage, op: Op) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """Wait until a backward can start; return the input and output of its forward, and the output's gradient."""
        stage.before_inputs(op)
        output_grad = self._messages.input_of(op, is_forward=False)
        self._offload.wait(op.chunk, op.microbatch)
        return (*self._activations[op.chunk, op.microbatch], output_grad)

    def _backward_input(self, stage: Stage, op: Op) -> None:
        with self._recomputation.backward(op.chunk):
            with self._store.deferring():
                self._backward(stage, op)
            self._store.flush(op.chunk, op.microbatch)

    def _backward_weight(self, stage: Stage, *ops: Op) -> None:
        """Run one W, or several W of one chunk; for several W, compute the weight gradients parameter by parameter."""
        self._begin(ops[0])
        if len(ops) == 1:
            stage.before_gradients(ops[0])
            self._store.pop(ops[0].chunk, ops[0].microbatch)
            return
        by_microbatch = {op.microbatch: op for op in ops}
        self._store.pop_by_parameter(
            ops[0].chunk, list(by_microbatch), lambda microbatch: stage.before_gradients(by_microbatch[microbatch])
        )

    def _step(self, stage: Stage, op: Op) -> None:
        self._begin(op)
        cast(SteppingStage, stage).step()

    def _validate(self, stage: Stage, op: Op) -> None:
        """Validate the last optimizer step; if forwards must run again, repeat the operations that precede `op`.

        Before a rank repeats operations, the rank receives all messages that other ranks sent before the validation.
        The repeated operations send the same messages again, and a channel delivers messages in order.
        """
        stepping_stage = cast(SteppingStage, stage)
        if stepping_stage.validate():
            for receive in self._stale:
                self._messages.receive(stepping_stage, receive)
            self._messages.drop_received()
            self._exchanges.finish()
            self._drop_results()
            stepping_stage.restart()
            self._run(stepping_stage, self._redone)
            self._progress.position = len(before_validation(self.schedule, self.rank))
        self._begin(op)

    def _begin(self, op: Op) -> None:
        """Record that the inputs of `op` have arrived and that `op` starts to compute."""
        self._progress.begin()
        if self._recorder is not None:
            self._recorder.begin(op)

    def _send(self, stage: Stage, op: Op) -> None:
        tensor = self._messages.send(op)
        if op.kind is OpKind.SEND_FORWARD and self._runs_backward:
            stage.release_output(tensor)

    def _check_nothing_left(self, unused_exchanges: Sequence[Op]) -> None:
        left = [f"W{microbatch} of chunk {chunk} is pending" for chunk, microbatch in self._store.pending()]
        left += [f"activations of F{m} of chunk {c} are alive" for c, m in self._activations]
        left += [f"offloaded activations of F{m} of chunk {c} are left" for c, m in self._offload.left()]
        left += self._messages.left()
        left += [f"the result of {exchange} was not used" for exchange in unused_exchanges]
        if left:
            ops = self.schedule.excerpt(self.rank, len(self.schedule.ops[self.rank]) - 1)
            raise LeftoverError(f"{self.schedule.name}: at the end of a step {'; '.join(left)}. {ops}")
