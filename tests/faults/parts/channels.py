"""Faults of the channels."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="run-ahead-limit-works-once",
        file="runtime/communicator.py",
        old="""            self._marks.popleft().synchronize()
""",
        new="""            self._marks[0].synchronize()
""",
        effect=(
            "After the first few messages nothing limits how far the process runs ahead of the GPU, and the "
            "messages of a whole step take memory at once."
        ),
    ),
    Fault(
        name="strided-message-sent-as-it-is",
        file="runtime/communicator.py",
        old="""        message = tensor if is_sent_as_it_is else tensor.detach().resolve_conj().resolve_neg().contiguous()
""",
        new="""        message = tensor
""",
        effect=(
            "A stage whose output or gradient is not contiguous, such as a transposed tensor, ends the training "
            "with an error or sends wrong values."
        ),
    ),
    Fault(
        name="message-under-way-can-be-freed",
        file="runtime/communicator.py",
        old="""        return _TorchSend(work, message.detach())
""",
        new="""        return _TorchSend(work, message)
""",
        effect=(
            "The stage frees the values of an activation while it is still being sent, so that the next rank may "
            "receive other values."
        ),
    ),
    Fault(
        name="gradient-awaited-in-the-usual-shape",
        file="mcore/forward_backward.py",
        old="""            self._sent[chunk, microbatch] = TensorSpec(tuple(output.shape), output.dtype, output.device)
""",
        new="""            self._sent[chunk, microbatch] = self.usual_message
""",
        effect=(
            "With sequence lengths that vary, the gradient of a shorter or longer microbatch is received into a "
            "buffer of the wrong shape."
        ),
    ),
    Fault(
        name="second-group-meets-the-first-ones-keys",
        file="runtime/process_group.py",
        old="""    return dist.PrefixStore(str(store.add(f"generation of {rank}", 1)), store)
""",
        new="""    return store
""",
        effect=(
            "Channels that are opened a second time in one job find the addresses of the first ones in the store, "
            "and hang or fail."
        ),
    ),
    Fault(
        name="sharded-model-with-plain-schedule-not-refused",
        file="mcore/connections.py",
        old="""        if schedule.is_vocabulary_parallel is (self._vocabulary is None):
            raise ScheduleError(
                f"schedule {schedule.name} has operations on vocabulary shards: call shard_vocabulary() on the model"
                if self._vocabulary is None
                else f"schedule {schedule.name} has no operations on vocabulary shards, which the model has"
            )
""",
        new="""        if schedule.is_vocabulary_parallel and self._vocabulary is None:
            raise ScheduleError(
                f"schedule {schedule.name} has operations on vocabulary shards: call shard_vocabulary() on the model"
            )
""",
        effect=(
            "A model with vocabulary shards under a schedule without their operations is not refused by name, and "
            "fails in the first forward with an obscure assertion."
        ),
    ),
)
