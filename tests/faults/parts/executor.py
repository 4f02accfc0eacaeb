"""Faults of the executor."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="backward-begins-before-its-message",
        file="runtime/executor.py",
        old="""        inputs = self._backward_inputs(stage, op)
        del self._activations[op.chunk, op.microbatch]
        self._begin(op)
""",
        new="""        self._begin(op)
        inputs = self._backward_inputs(stage, op)
        del self._activations[op.chunk, op.microbatch]
""",
        effect=(
            "The measured time of a backward includes the wait for its message, so plans and idle shares are "
            "wrong and the watchdog says that a waiting rank computes."
        ),
    ),
    Fault(
        name="grouped-w-prepared-as-first-microbatch",
        file="runtime/executor.py",
        old="""            ops[0].chunk, list(by_microbatch), lambda microbatch: stage.before_gradients(by_microbatch[microbatch])
""",
        new="""            ops[0].chunk, list(by_microbatch), lambda microbatch: stage.before_gradients(ops[0])
""",
        effect=(
            "With overlapped reduction over replicas, weight gradients that run together at the end of a step are "
            "never counted as ready, so that they are reduced too early or an error ends the step."
        ),
    ),
    Fault(
        name="token-count-of-last-forward-only",
        file="mcore/forward_backward.py",
        old="""        self.num_tokens += num_tokens
        stage =""",
        new="""        self.num_tokens = num_tokens
        stage =""",
        effect=(
            "With a loss per token, gradients are divided by the tokens of one microbatch and not by those of the "
            "whole step."
        ),
    ),
    Fault(
        name="last-sends-not-waited-for",
        file="runtime/stage_messages.py",
        old="""        for send in (*self._headers, *self._sends):
            send.wait()
""",
        new="",
        effect=(
            "A step or evaluation may end while its last messages are on their way; a message that is dropped "
            "then lets the next rank hang."
        ),
    ),
    Fault(
        name="consequence-raised-in-place-of-cause",
        file="runtime/executor.py",
        old="""            raise cause from error
""",
        new="""            raise error from cause
""",
        effect=(
            "Where a collective of the vocabulary shards has failed, the step ends with the error of a lost "
            "message and not with that of the collective."
        ),
    ),
    Fault(
        name="group-counts-as-one-position",
        file="runtime/steps.py",
        old="""        position += len(together)
""",
        new="""        position += 1
""",
        effect=(
            "With weight gradients that run together, the position of all later operations is too small, so the "
            "watchdog and errors name the wrong operation."
        ),
    ),
)
