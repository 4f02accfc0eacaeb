"""Reads the layout of the checkpoint from which a script continues, and refuses a checkpoint of another layout."""

from __future__ import annotations

import contextlib
import copy
import io
from argparse import Namespace
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.mcore.checkpoint_writing import written_in_threads
from megatron.zero_bubble.runtime.joint import jointly
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.hybrid_pattern import undivided
from megatron.zero_bubble.session.settings import JobSettings
from megatron.zero_bubble.session.start_up import SessionError, users_mistakes

_RESHARDED = "torch_dist"
"""Format of checkpoints that load into every layout."""
_TRACKER = "latest_checkpointed_iteration.txt"
_STAGES = "zero_bubble_stages"
"""Name of the script argument that records a job's stages: kind of placement, chunks a rank, layers of each stage."""
_PLACEMENT, _VOCABULARY = "zero_bubble_placement", "zero_bubble_vocabulary_parallel"
"""Names of the script arguments that record a chosen placement, and whether a job has vocabulary shards."""
_PATTERN = "hybrid_layer_pattern"
_DISTRIBUTED = ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer")
"""Names of the script arguments for an optimizer whose states are spread over replicas."""


@dataclass(frozen=True)
class ScriptCheckpoint:
    """The checkpoint that a script loads.

    Attributes:
        script: the script's arguments.
        name: name of the script argument that gives the checkpoint's folder, `load` or `pretrained_checkpoint`.
    """

    script: Namespace
    name: str

    @classmethod
    def of(cls, script: Namespace) -> ScriptCheckpoint | None:
        """Return the checkpoint that the script arguments `script` name; None if the script loads no checkpoint.

        Raises:
            SessionError: the checkpoint's tracker file is damaged, or the iteration of `--ckpt-step` is missing.
        """
        load, pretrained = (getattr(script, name, None) for name in ("load", "pretrained_checkpoint"))
        is_pretrained = pretrained and not (load and Path(load, _TRACKER).is_file())
        if not (folder := pretrained if is_pretrained else load):
            return None
        checkpoint = cls(script, "pretrained_checkpoint" if is_pretrained else "load")
        newer = getattr(script, "non_persistent_global_ckpt_dir", None) or Path(folder, "non_persistent")
        has_newer = getattr(script, "non_persistent_ckpt_type", None) == "global" and Path(newer, _TRACKER).is_file()
        if not has_newer:
            checkpoint._check_iteration()
        return checkpoint if checkpoint._iteration is not None or has_newer else None

    def __str__(self) -> str:
        return f"{flag_name(self.name)} {getattr(self.script, self.name)}"

    @property
    def _iteration(self) -> str | None:
        """The iteration, or "release", of the persistent checkpoint; None if there are only non-persistent ones."""
        folder, step = Path(getattr(self.script, self.name)), getattr(self.script, "ckpt_step", None)
        if step:
            return str(step) if folder.is_dir() else None
        return (folder / _TRACKER).read_text(errors="replace").strip() if (folder / _TRACKER).is_file() else None

    def _check_iteration(self) -> None:
        """Raise `SessionError` if the tracker file names no iteration, or the iteration of `--ckpt-step` is missing."""
        iteration, folder = self._iteration, Path(getattr(self.script, self.name))
        if iteration is None or iteration == "release":
            return
        if not iteration.isdecimal():
            raise SessionError(f"{self}: {_TRACKER} contains {iteration!r:.80} in place of an iteration, such as 1000")
        steps = [int(path.name[5:]) for path in folder.glob("iter_*") if path.name[5:].isdecimal()]
        if getattr(self.script, "ckpt_step", None) and int(iteration) not in steps:
            there = ", ".join(map(str, sorted(steps))) or "none"
            raise SessionError(f"--ckpt-step {iteration}: {self} has no such iteration (it has {there})")

    @property
    def is_continued(self) -> bool:
        """Whether the script resumes the checkpoint's training, and therefore keeps the checkpoint's layout."""
        return self.name == "load" and not getattr(self.script, "finetune", False)

    @cached_property
    def other_format(self) -> str | None:
        """The checkpoint's format; None if the checkpoint loads into every layout.

        Megatron-LM also reads the format torch if `--ckpt-format` is torch_dist.
        """
        folder, iteration = Path(getattr(self.script, self.name)), self._iteration
        if iteration is None:  # Non-persistent checkpoints have shards.
            return None
        files = folder / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration)
        kind = str(getattr(self.script, "ckpt_format", "torch"))
        if files.is_dir():
            has_shards = (files / "metadata.json").is_file()
            kind = _RESHARDED if has_shards else "torch" if kind == _RESHARDED else kind
        return None if kind == _RESHARDED else kind

    @property
    def keeps_optimizers_layout(self) -> bool:
        """Whether the script loads states of a distributed optimizer that fit only the layout of the saved job."""
        loads_states = self.is_continued and self._iteration != "release" and _spreads_states(self.script)
        if not loads_states or getattr(self.script, "no_load_optim", False) or (saved := self.arguments) is None:
            return False
        if getattr(saved, "no_save_optim", False) or getattr(saved, "dist_ckpt_optim_fully_reshardable", True):
            return False
        return _spreads_states(saved)

    @cached_property
    def arguments(self) -> Namespace | None:
        """The checkpoint's arguments; None if the checkpoint has no arguments. The first access is a collective call.

        To get the arguments of a checkpoint of format torch, Megatron-LM reads a rank's whole file.

        Raises:
            SessionError: Megatron-LM cannot read the file.
        """

        def read() -> Namespace | None:
            from megatron.training.checkpointing import load_args_from_checkpoint

            # A collective call, which changes the given arguments in place. If the checkpoint has arguments, the
            # result is a pair of the given arguments and the checkpoint's arguments.
            given = copy.copy(self.script)
            if getattr(given, "non_persistent_ckpt_type", None) == "local":
                given.non_persistent_ckpt_type = None  # Megatron-LM reads no arguments from a local checkpoint.
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    result = load_args_from_checkpoint(given, load_arg=self.name)
            except SystemExit as error:  # Megatron-LM prints the reason, and then ends the script.
                raise SessionError(f"{self}: {': '.join(printed.getvalue().splitlines()[:2])}") from error
            return result[1] if isinstance(result, tuple) else None

        return jointly(read)

    @users_mistakes()
    def check_stages(self, job: JobSettings) -> None:
        """Refuse a checkpoint that fits only its own layout if `job` has another layout; a collective call.

        Megatron-LM loads a checkpoint with one file per rank without an error, because it matches layers by their
        numbers on the rank. The weights of layers from another stage, of chunks and layers that are not in the file,
        and of the vocabulary, if only one of the jobs has vocabulary shards, would be wrong.

        Raises:
            SessionError: the checkpoint does not fit the job.
        """
        kind = self.other_format
        if (kind is None and not self.keeps_optimizers_layout) or self.arguments is None:
            return
        now = _stages(job)
        was = getattr(self.arguments, _STAGES, None)
        if was is None:
            # The checkpoint was saved without zero bubble, or by an earlier version, which recorded only a chosen
            # placement.
            chunks = getattr(self.arguments, "virtual_pipeline_model_parallel_size", None) or 1
            given = getattr(self.arguments, _PLACEMENT, None)
            was, now = (given or ("linear" if chunks == 1 else "interleaved"), chunks), now[:2]
        recorded, has_shards = getattr(self.arguments, _VOCABULARY, None), job.flags.vocabulary_parallel
        # Version 0.2 recorded only chosen shards; states of an optimizer that do not fit the shards are not loaded.
        had_shards = has_shards if recorded is None and kind is None else recorded == "on"
        if (was, had_shards) == (now, has_shards):
            return
        content, other, flag = f"a checkpoint of format {kind}", "", f"--ckpt-format {_RESHARDED}"
        if kind is None:
            content, other = "the state of the distributed optimizer", "give --no-load-optim, "
            flag = "--dist-ckpt-optim-fully-reshardable"
        raise SessionError(
            f"{self}: {content} loads only into its own layout ({_words(was, had_shards)}), and this job has another "
            f"({_words(now, has_shards)}): choose flags that give the layout of the checkpoint, {other}or save the "
            f"checkpoint again with its flags and {flag}, which fits every layout"
        )


def load_arguments(call: Call) -> Any:
    """When `load_args_from_checkpoint` is called, leave the stages of a chosen layout out of the layer pattern.

    With `--use-checkpoint-args`, Megatron-LM copies a pattern that is not on the command line from the checkpoint. The
    job that saved the checkpoint had divided its pattern into the stages of the chosen layout.
    """
    script = call["args"]
    given = getattr(script, _PATTERN, None)
    result = call.proceed()
    pattern = getattr(script, _PATTERN, None)
    if given is None and pattern is not None and getattr(result[1], _PLACEMENT, None) is not None:
        setattr(script, _PATTERN, undivided(pattern))
    return result


def record_stages(script: Namespace, job: JobSettings) -> None:
    """Record the stages and the vocabulary shards of `job` in the script's arguments, which checkpoints contain."""
    setattr(script, _STAGES, _stages(job))
    setattr(script, _VOCABULARY, job.flags.zero_bubble_vocabulary_parallel)


def _stages(job: JobSettings) -> tuple[str | int, ...]:
    return job.placement.kind, job.placement.num_chunks, *job.partition


def _words(stages: tuple[str | int, ...], has_shards: bool) -> str:
    kind, num_chunks, *layers = stages
    words = f"{num_chunks} chunk{'' if num_chunks == 1 else 's'} a rank{', in a V' if kind == 'v' else ''}"
    words += f", layers {' '.join(map(str, layers))}" if layers else ""
    return f"{words}, vocabulary shards" if has_shards else words


def _spreads_states(script: Namespace) -> bool:
    return any(getattr(script, name, False) for name in _DISTRIBUTED)


def writes_in_threads(script: Namespace) -> AbstractContextManager[None]:
    """Let megatron-core write a script's checkpoints in threads instead of in processes; see `written_in_threads`."""
    return written_in_threads(keep_results=not getattr(script, "async_save", False))
