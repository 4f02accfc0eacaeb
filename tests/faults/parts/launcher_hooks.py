"""Faults of the launcher hooks."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="disable-leaves-imported-names",
        file="launcher/hooks.py",
        old="""        _replace_everywhere((target, replacement, target.function) for target, replacement in self._replaced)
""",
        new="""        for target, _ in self._replaced:
            setattr(target.owner, target.attribute, target.function)
""",
        effect="After disable(), modules of Megatron-LM that imported a hooked function by name still call the hook.",
    ),
    Fault(
        name="sums-of-losses-not-averaged",
        file="launcher/script_steps.py",
        old="""            sums, names = call["total_loss_dict"], list(call["loss_dict"])
            call["loss_dict"] = {name: _mean_over_replicas(call["loss_dict"][name]) for name in names}
            for name in names:
                if is_printed and name in sums:
                    sums[name] = _mean_over_replicas(sums[name])""",
        new="""            names = list(call["loss_dict"])
            call["loss_dict"] = {name: _mean_over_replicas(call["loss_dict"][name]) for name in names}""",
        effect=(
            "Under hierarchical SGD with a log interval above 1, a script's log line shows the losses of one "
            "replica for all but the last iteration."
        ),
    ),
    Fault(
        name="settled-step-keeps-the-gradient-buffers",
        file="launcher/script_steps.py",
        old="""        self._outcome = outcome
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()""",
        new="""        self._outcome = outcome
        self._optimizer.zero_grad()""",
        effect=(
            "Under post-validation in a Megatron-LM script, the gradients of earlier iterations are added to "
            "those of the next one."
        ),
    ),
    Fault(
        name="v-keeps-the-running-stage",
        file="launcher/script_stages.py",
        old="""            try:
                return forward_step(data_iterator, model, *more, **options)
            finally:
                self._running = None""",
        new="            return forward_step(data_iterator, model, *more, **options)",
        effect=(
            "In a V, the script asks for its stage after a step and gets that of the last microbatch, so that "
            "losses or data are missing on a rank."
        ),
    ),
    Fault(
        name="stand-in-layout-stays",
        file="launcher/script_choice.py",
        old="""    before = change_settings(script, settings)
    result = call.proceed()
    if is_layout_open(job):
        vars(script).update(before)
    return result""",
        new="""    change_settings(script, settings)
    return call.proceed()""",
        effect=(
            "With a number of layers that the stages do not divide, --zero-bubble silently keeps an even split "
            "and chooses no layout."
        ),
    ),
    Fault(
        name="chunks-added-beside-a-layout",
        file="launcher/command_line.py",
        old="    if entry is None or entry.num_chunks == 1 or given.intersection(map(flag_name, (*CHUNK_SOURCES, *PATTERNS))):",
        new="    if entry is None or entry.num_chunks == 1 or given.intersection(map(flag_name, (*CHUNK_SOURCES[:2], *PATTERNS))):",
        effect=(
            "A script with its own --pipeline-model-parallel-layout and a schedule of several chunks gets a "
            "second flag for the chunks, which Megatron-LM refuses."
        ),
    ),
)
