"""Keeps a rank's channels and collectives open from the first step of a run to the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.zero_bubble.mcore.step_call import StepCall
from megatron.zero_bubble.mcore.vocabulary_run import VocabularyRun, open_vocabulary
from megatron.zero_bubble.mcore.vocabulary_stage import VocabularyStep
from megatron.zero_bubble.runtime.channel_memory import ChannelMemory, open_channels
from megatron.zero_bubble.runtime.communicator import TensorSpec, TorchCommunicator
from megatron.zero_bubble.runtime.device import own_device
from megatron.zero_bubble.runtime.exchange_lane import ExchangeLane
from megatron.zero_bubble.runtime.message_times import measure_collective, measure_edges
from megatron.zero_bubble.runtime.variable_shapes import VariableCommunicator
from megatron.zero_bubble.schedule import Placement, Schedule, ScheduleError

DEFAULT_TIMEOUT = timedelta(minutes=10)
_VARY_SHAPES = ("variable_seq_lengths", "mtp_standalone", "enable_hyper_connections", "enable_mhc_connections")
"""Settings of megatron-core with which the shape of a message does not follow from sequence length and hidden size.

With `mtp_standalone`, a stage of prediction layers sends the hidden states of several tokens; with hyper connections,
several residual streams pass between stages.
"""


@dataclass(eq=False)
class Connections:
    """A rank's channels to neighboring stages and, if the model has vocabulary shards, the shards' collectives.

    Args:
        communicator: the class of the channels.
        timeout: time limit for one message or collective, by default 10 minutes, as in Megatron-LM.
        report: function that gets the `ChannelMemory` of the rank with the most channels; every rank of a job on GPUs
            calls this function once the channels are open.
    """

    communicator: type[TorchCommunicator] = TorchCommunicator
    timeout: timedelta = DEFAULT_TIMEOUT
    report: Callable[[ChannelMemory], None] = lambda memory: None
    shapes_vary: bool = field(default=False, init=False)
    _channels: TorchCommunicator | VariableCommunicator | None = field(default=None, init=False)
    _vocabulary: VocabularyRun | None = field(default=None, init=False)

    def prepare(self, chunks: Sequence[torch.nn.Module], placement: Placement, groups: ProcessGroupCollection) -> None:
        """Read the model's settings, and open the collectives of vocabulary shards if the model has vocabulary shards.

        All ranks of a pipeline, and all ranks of their tensor-parallel groups, call `prepare` together. Calls of
        `prepare` after the first have no effect.
        """
        if self._channels is None:
            config = get_model_config(chunks[0])
            self.shapes_vary = any(getattr(config, name, False) for name in _VARY_SHAPES)
        if self._vocabulary is None:
            self._vocabulary = open_vocabulary(chunks, placement, groups, own_device(), self.timeout)

    def channels(self, schedule: Schedule, group: dist.ProcessGroup) -> TorchCommunicator | VariableCommunicator:
        """Return the channels for a schedule's messages; the first call opens the channels and is a collective call.

        Raises:
            ScheduleError: the model has vocabulary shards but the schedule has no operations on vocabulary shards, or
                the schedule has such operations but the model has no vocabulary shards.
        """
        if schedule.is_vocabulary_parallel is (self._vocabulary is None):
            raise ScheduleError(
                f"schedule {schedule.name} has operations on vocabulary shards: call shard_vocabulary() on the model"
                if self._vocabulary is None
                else f"schedule {schedule.name} has no operations on vocabulary shards, which the model has"
            )
        if self._channels is None:
            given = (group, schedule.placement, own_device(), self.timeout, self.report)
            self._channels = open_channels(self.communicator, *given, shapes_vary=self.shapes_vary)
        return self._channels

    @property
    def exchange_lane(self) -> ExchangeLane | None:
        """The CUDA stream or thread that runs the vocabulary shards' collectives; None without vocabulary shards."""
        return None if self._vocabulary is None else self._vocabulary.lane

    def vocabulary_step(self, call: StepCall) -> VocabularyStep | None:
        """Return the `VocabularyStep` of one step; None if the model has no vocabulary shards."""
        if self._vocabulary is None:
            return None
        return VocabularyStep(
            self._vocabulary, call.num_microbatches, call.output_shape, forward_only=call.forward_only
        )

    def measure_messages(self, placement: Placement, rank: int, message: TensorSpec) -> tuple[dict[int, float], float]:
        """Measure the milliseconds of a message and of a collective between vocabulary shards.

        All ranks of the job must call `measure_messages`, after all channels are open.

        Returns:
            The first value maps stage `s` to the time of a message between the stages `s` and `s + 1`, if this rank has
            exactly one of these two stages. The second value is the time of a collective between vocabulary shards, or
            0 if the model has no vocabulary shards.
        """
        assert self._channels is not None
        edges, vocabulary = measure_edges(self._channels, placement, rank, message), self._vocabulary
        if vocabulary is None:
            return edges, 0.0
        return edges, measure_collective(vocabulary.collectives.pipeline, vocabulary.lane, message)

    def close(self) -> None:
        """Close all connections, before the job's process groups are destroyed."""
        if self._channels is not None:
            self._channels.close()
            self._channels = None
        if self._vocabulary is not None:
            self._vocabulary.close()
            self._vocabulary = None
