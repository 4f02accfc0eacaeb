"""Passes tensors between the stages of one rank and the neighbouring stages during a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from megatron.zero_bubble.runtime.communicator import Arrived, Communicator, PendingReceive, PendingSend
from megatron.zero_bubble.runtime.stage import Stage
from megatron.zero_bubble.runtime.variable_shapes import Announcing
from megatron.zero_bubble.schedule import Op, OpKind, Schedule

_Key = tuple[bool, int, int]
"""Key of a message: True for an activation and False for a gradient, then the model chunk and the microbatch."""


class StageMessages:
    """Passes outputs and gradients between neighbouring stages, through channels or directly within a rank.

    Args:
        schedule: the schedule, whose placement assigns stages to ranks.
        rank: this process's pipeline rank.
        communicator: the channels to the neighbouring ranks.
    """

    def __init__(self, schedule: Schedule, rank: int, communicator: Communicator) -> None:
        self._placement, self._rank = schedule.placement, rank
        self._stages = schedule.placement.stages_of(rank)
        self._communicator = communicator
        self._announcing = communicator if isinstance(communicator, Announcing) else None
        self._incoming: dict[_Key, PendingReceive] = {}
        self._outgoing: dict[_Key, torch.Tensor] = {}
        self._sends: deque[PendingSend] = deque()
        self._headers: list[PendingSend] = []
        """The sends of headers of messages, whose ends gloo tells only to a rank that waits."""

    def input_of(self, op: Op, *, is_forward: bool) -> torch.Tensor | None:
        """Wait for the input that `op` needs from another stage; return None if `op` needs no such input."""
        edge = 0 if is_forward else self._placement.num_stages - 1
        if self._stages[op.chunk] == edge:
            return None
        return self._incoming.pop((is_forward, op.chunk, op.microbatch)).wait()

    def hand_on(self, op: Op, tensor: torch.Tensor | None, *, is_forward: bool) -> bool:
        """Pass the result of `op` to a stage on the same rank, or keep the result for a later send.

        Returns:
            Whether a stage on the same rank has received `tensor`.
        """
        neighbour = self._stages[op.chunk] + (1 if is_forward else -1)
        if tensor is None or neighbour == self._placement.num_stages:
            return False
        if self._placement.rank_of(neighbour) != self._rank:
            self._outgoing[is_forward, op.chunk, op.microbatch] = tensor
            return False
        chunk = self._placement.chunk_of(neighbour)
        self._incoming[is_forward, chunk, op.microbatch] = Arrived(tensor.detach())
        return True

    def send(self, op: Op) -> torch.Tensor:
        """Start to send the message of the send operation `op`, and return the message."""
        is_forward = op.kind is OpKind.SEND_FORWARD
        tensor = self._outgoing.pop((is_forward, op.chunk, op.microbatch))
        destination = self._placement.peer_of(self._rank, op)
        if is_forward and self._announcing is not None:
            self._headers.append(self._announcing.announce(tensor, destination))
        self._sends.append(self._communicator.send(tensor, destination))
        return tensor

    def receive(self, stage: Stage, op: Op) -> None:
        """Start to receive the message of the receive operation `op`."""
        source = self._placement.peer_of(self._rank, op)
        key = (op.kind is OpKind.RECV_FORWARD, op.chunk, op.microbatch)
        self._incoming[key] = self._communicator.receive(source, stage.message_spec(op))

    def drop_received(self) -> None:
        """Wait for all messages that no operation has used, and drop these messages."""
        for message in self._incoming.values():
            message.wait()
        self._incoming.clear()

    def forget(self) -> None:
        """Drop all messages of a failed step without waiting for the messages, which may never arrive."""
        self._incoming.clear()
        self._outgoing.clear()
        self._sends.clear()
        self._headers.clear()

    def drop_finished_sends(self) -> None:
        while self._sends and self._sends[0].is_done():
            self._sends.popleft()

    def finish_sends(self) -> None:
        """Wait until all messages have been sent."""
        for send in (*self._headers, *self._sends):
            send.wait()
        self._sends.clear()
        self._headers.clear()

    def left(self) -> Iterator[str]:
        """Describe the messages that are unused or unsent at the end of a step; a correct step has none."""
        for words, messages in (("received, not used", self._incoming), ("computed, not sent", self._outgoing)):
            for _, chunk, microbatch in messages:
                yield f"a message of microbatch {microbatch}, chunk {chunk} was {words}"
