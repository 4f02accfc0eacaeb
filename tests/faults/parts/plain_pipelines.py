"""Faults of the plain pipelines."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="tied-gradient-forgets-earlier-steps",
        file="pipeline/gradients.py",
        old="before = total.clone() if before is None else before.add_(total)",
        new="before = total.clone()",
        effect=(
            "When gradients of several train_batch calls are accumulated, tied layers keep only those of the last call."
        ),
    ),
    Fault(
        name="norm-in-the-order-of-ranks",
        file="pipeline/gradients.py",
        old="in_order = sorted(norms, key=lambda entry: entry[0])",
        new="in_order = list(norms)",
        effect=(
            "With several chunks a rank, the norm of all gradients, and so clipping, no longer has the bits of "
            "one process."
        ),
    ),
    Fault(
        name="probe-changes-buffers",
        file="pipeline/layer_stage.py",
        old="        with without_trace(self._restored_modules, self.device), self.autocast.forward():",
        new="        with self.autocast.forward():",
        effect=(
            "Layers with buffers, such as batch norm, count the microbatch that only finds out the messages, so "
            "that running means are wrong from the first step on."
        ),
    ),
    Fault(
        name="messages-of-evaluation-used-in-training",
        file="pipeline/discovery.py",
        old="        key = trains, *described",
        new="        key = tuple(described)",
        effect=(
            "After an evaluation before the first training step, stages believe that no message needs a gradient, "
            "and earlier stages do not train."
        ),
    ),
    Fault(
        name="old-settings-stay-after-an-amended-step",
        file="pipeline/late_steps.py",
        old="""            with with_settings(pending.optimizer.param_groups, pending.settings):
""",
        new="""            for group, settings in zip(pending.optimizer.param_groups, pending.settings, strict=True):
                group.update(settings)
            if was_wrong:
""",
        effect=(
            "With post-validation and a learning-rate scheduler, an amended step puts the optimizer back to the "
            "learning rate of the step before."
        ),
    ),
    Fault(
        name="recomputation-draws-other-numbers",
        file="pipeline/dropped_layers.py",
        old="""            torch.set_rng_state(self._random_state)
            set_device_states(devices, states)""",
        new="            set_device_states(devices, states)",
        effect=(
            "On a CPU, a checkpointed layer with dropout runs again with another mask than in its forward, so "
            "that its gradients are wrong."
        ),
    ),
)
