"""Faults of the trainer and command line."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="sampler-begins-anew",
        file="trainer/data_loader.py",
        old="    for start in range(consumed_samples, total_samples",
        new="    for start in range(0, total_samples",
        effect="A resumed run reads its data from the beginning again.",
    ),
    Fault(
        name="pause-restarts-the-clock",
        file="trainer/logging.py",
        old="        self._start += _now() - paused_at",
        new="        self._start = _now()",
        effect=(
            "The log line after an evaluation or a save within a log interval shows too short a time per iteration."
        ),
    ),
    Fault(
        name="unknown-norm-counts-as-finite",
        file="mcore/finite.py",
        old="        if norm is None or not math.isfinite(norm):",
        new="        if norm is not None and not math.isfinite(norm):",
        effect=(
            "With a constant loss scale, a gradient that is not finite no longer ends the training with its "
            "cause: the steps are skipped silently."
        ),
    ),
    Fault(
        name="estimate-exposes-the-reduction-of-fsdp",
        file="cli/estimate/schedule_estimate.py",
        old="        if max(self.job.replicas) == 1 or args.overlap_grad_reduce or args.use_torch_fsdp2:",
        new="        if max(self.job.replicas) == 1 or args.overlap_grad_reduce:",
        effect=(
            "The estimate of a training with FSDP2 adds the time of communication that overlaps with computing, "
            "and so predicts too low a throughput."
        ),
    ),
    Fault(
        name="lost-share-forgets-recomputation",
        file="cli/schedule/figures.py",
        old="        return float(1 - max(map(sub, self.timeline.work, recomputing)) / self.timeline.cost)",
        new="        return float(1 - max(self.timeline.work) / self.timeline.cost)",
        effect="The schedule command says that less time is lost to the bubble and R than is, with recomputation.",
    ),
    Fault(
        name="benchmark-counts-the-warmup",
        file="cli/benchmark/training_turn.py",
        old="    measured = [(milliseconds, line) for iteration, milliseconds, line in lines if iteration > warmup]",
        new="    measured = [(milliseconds, line) for iteration, milliseconds, line in lines if iteration >= warmup]",
        effect=(
            "The benchmark counts the last interval of the warmup among its measurements, which makes results "
            "slower and less even."
        ),
    ),
)
