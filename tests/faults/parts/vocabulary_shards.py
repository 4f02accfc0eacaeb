"""Faults of the vocabulary shards."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="fp16-scale-forgotten-in-weight-gradient",
        file="mcore/vocabulary_shard.py",
        old="""        gradient = self.difference.to(alpha.dtype) * (loss_gradient * alpha / self.scale).unsqueeze(1)
""",
        new="""        gradient = self.difference.to(alpha.dtype) * (loss_gradient * alpha).unsqueeze(1)
""",
        effect="With fp16 weights the gradient of the output layer is about a thousand times too large.",
    ),
    Fault(
        name="first-row-of-next-shard-taken-as-own",
        file="mcore/vocabulary_shard.py",
        old="""        return torch.remainder(row, self.count), (row >= 0) & (row < self.count)
""",
        new="""        return torch.remainder(row, self.count), (row >= 0) & (row <= self.count)
""",
        effect=(
            "The first token of every shard but the first is also counted by the shard before it, so its "
            "embedding and loss are wrong."
        ),
    ),
    Fault(
        name="labels-in-the-wrong-order",
        file="mcore/vocabulary_stage.py",
        old="""        labels = _there(state.labels).t().reshape(-1)
""",
        new="""        labels = _there(state.labels).reshape(-1)
""",
        effect="With more than one sequence in a microbatch, losses are computed with the labels of other tokens.",
    ),
    Fault(
        name="hidden-states-kept-to-the-end",
        file="mcore/vocabulary_stage.py",
        old="""        state.hidden = state.labels = None
        self._complete_with_last(microbatch, output)
""",
        new="""        self._complete_with_last(microbatch, output)
""",
        effect=(
            "Every rank keeps the last stage's output of all microbatches until the end of the step, and needs "
            "more memory the more microbatches there are."
        ),
    ),
    Fault(
        name="every-tensor-rank-takes-the-first-part",
        file="mcore/vocabulary_run.py",
        old="""            return parts[self.tensor.rank].clone()
""",
        new="""            return parts[0].clone()
""",
        effect=(
            "With tensor and sequence parallelism all tensor ranks but the first begin the backward of the last "
            "stage with the gradient of other tokens."
        ),
    ),
    Fault(
        name="failed-rank-stays-in-its-groups",
        file="runtime/exchange_lane.py",
        old="""                self._leave()
                failure = error
""",
        new="""                failure = error
""",
        effect=(
            "When a collective of the vocabulary shards fails on one rank, the other ranks wait for it until the "
            "timeout."
        ),
    ),
)
