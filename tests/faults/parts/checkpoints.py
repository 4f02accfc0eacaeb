"""Faults of the checkpoints."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="validation-samples-not-restored",
        file="trainer/checkpoint.py",
        old="""            self._progress.consumed_train_samples = common["args"].consumed_train_samples
            self._progress.consumed_valid_samples = common["args"].consumed_valid_samples""",
        new="""            self._progress.consumed_train_samples = common["args"].consumed_train_samples""",
        effect=(
            "A resumed run evaluates from the beginning of the validation data again, so that its validation "
            "losses differ from those of a run that never stopped."
        ),
    ),
    Fault(
        name="override-of-learning-rate-lost",
        file="trainer/checkpoint.py",
        old="""            # The optimizer's groups now hold the checkpoint's rates, and the scheduler prefers a group's rates.
            group["max_lr"], group["min_lr"] = scheduler.max_lr, scheduler.min_lr
""",
        new="",
        effect=(
            "After a resume with --override-opt-param-scheduler and another --lr, the run still trains with the "
            "old learning rate."
        ),
    ),
    Fault(
        name="tracker-before-the-folder",
        file="trainer/checkpoint_files.py",
        old="""    os.rename(folder, final)
    _sync(root)
    write_file(root / TRACKER, str(iteration))""",
        new="""    write_file(root / TRACKER, str(iteration))
    os.rename(folder, final)
    _sync(root)""",
        effect=(
            "If a job is killed, or a rename fails, at the end of a save, the tracker file names a checkpoint "
            "that is not there, and the next job cannot load."
        ),
    ),
    Fault(
        name="named-before-it-is-on-the-disk",
        file="trainer/checkpoint_files.py",
        old="""    for path in folder.iterdir():
        _sync(path)
    _sync(folder)""",
        new="    _sync(folder)",
        effect="After a power failure a checkpoint can have its name while its files are empty.",
    ),
    Fault(
        name="gated-rows-misplaced-across-tensor-ranks",
        file="mcore/shard_checkpoints.py",
        old="    return [(half * num_ranks + rank) * in_half + place for half, place in halves], 2 * num_ranks * in_half",
        new="    return [(2 * rank + half) * in_half + place for half, place in halves], 2 * num_ranks * in_half",
        effect=(
            "With FSDP2, tensor parallelism and a gated MLP, a checkpoint mixes rows of the gate with rows of the "
            "input, and is wrong when other ranks load it."
        ),
    ),
    Fault(
        name="one-step-count-for-all-parameters",
        file="mcore/optimizer.py",
        old='        state["step"] = steps.clone()',
        new='        state["step"] = steps',
        effect=(
            "After a resume with the distributed optimizer, every parameter's step counts up a shared number of "
            "steps, so that Adam's bias correction is wrong."
        ),
    ),
)
