"""Finds out which messages the stages of a pipeline exchange, by sending one microbatch through all of them."""

from __future__ import annotations

import torch

from megatron.zero_bubble.pipeline.interconnect import Agreement
from megatron.zero_bubble.pipeline.layer_stage import LayerStage
from megatron.zero_bubble.pipeline.messages import MessageCommunicator, MessageSpec, StageMessage
from megatron.zero_bubble.schedule import Placement


def discover_messages(
    stage: LayerStage,
    placement: Placement,
    rank: int,
    communicator: MessageCommunicator,
    agreement: Agreement,
    device: torch.device,
) -> dict[int, MessageSpec]:
    """Return the spec of what each stage but the last one sends to the next; a collective call of all ranks.

    Raises:
        ValueError: a layer fails, on all ranks.
    """
    specs: dict[int, MessageSpec] = {}
    incoming: StageMessage | None = None
    for sender in range(placement.num_stages):
        here = placement.rank_of(sender)
        outputs: list[StageMessage] = []

        def run() -> MessageSpec:
            outputs.append(stage.probe(sender, incoming))  # noqa: B023
            return outputs[0].spec  # noqa: B023

        spec = agreement.on(here, run)
        if sender == placement.num_stages - 1:
            break
        there = placement.rank_of(sender + 1)
        specs[sender] = spec.on(device)
        incoming = None
        if rank == here == there:
            incoming = outputs[0].detach()
        elif rank == here:
            communicator.send(outputs[0], there).wait()
        elif rank == there:
            incoming = communicator.receive(here, specs[sender]).wait()
    return specs
