"""Faults of the post-validation and rollback."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="waiting-step-not-counted-in-the-loss-scale",
        file="mcore/post_validation.py",
        old="""            self._confirm_scales()
            self._step_again()
""",
        new="""            self._step_again()
""",
        effect="The loss scale does not grow after steps that waited for their validation.",
    ),
    Fault(
        name="state-made-by-undone-step-kept",
        file="runtime/rollback.py",
        old="""            for key in [key for key in optimizer.state if key not in states]:
                del optimizer.state[key]  # the undone step created this state
""",
        new="",
        effect=(
            "If the very first step of a run is undone, the optimizer keeps the moments and the count of the "
            "undone step."
        ),
    ),
    Fault(
        name="settings-of-the-old-step-stay",
        file="mcore/post_validation.py",
        old="""        with with_settings(self._optimizer.param_groups, pending.settings):
            was_wrong""",
        new="""        for group, settings in zip(self._optimizer.param_groups, pending.settings, strict=True):
            group.update(settings)
        if pending:
            was_wrong""",
        effect=(
            "After each validation the learning rate and weight decay are those of the step before, so a schedule "
            "of the learning rate is one step late."
        ),
    ),
    Fault(
        name="undone-parameters-not-handed-out",
        file="mcore/post_validation.py",
        old="""            self._rollback.undo()
            copy_to_model(self._optimizer)
            self._gather()
""",
        new="""            self._rollback.undo()
""",
        effect=(
            "With a loss scale, forwards that run again after a skipped step still use the model's 16-bit "
            "parameters of the undone step."
        ),
    ),
    Fault(
        name="buffers-saved-without-a-copy",
        file="mcore/restart.py",
        old="""        self._copies = [(buffer, buffer.clone()) for buffer in buffers.values()]
""",
        new="""        self._copies = [(buffer, buffer) for buffer in buffers.values()]
""",
        effect=(
            "What forwards count in buffers, such as the tokens of an expert, is counted twice when they run "
            "again after an amended step or the warm-up."
        ),
    ),
    Fault(
        name="inverted-second-moment-may-be-negative",
        file="runtime/rollback.py",
        old="""    exp_avg_sq.addcmul_(gradient, gradient, value=beta2 - 1).div_(beta2).clamp_(min=0)
""",
        new="""    exp_avg_sq.addcmul_(gradient, gradient, value=beta2 - 1).div_(beta2)
""",
        effect=(
            "With the inverse rollback, rounding can leave a second moment just below zero, and a later step "
            "makes NaN parameters."
        ),
    ),
    Fault(
        name="losses-of-undone-forwards-kept",
        file="mcore/forward_backward.py",
        old="""        self.forward_data_store.clear()
""",
        new="",
        effect=(
            "After an amended step the losses of the undone forwards are returned, too, and the logged loss is a "
            "mean of wrong ones."
        ),
    ),
)
