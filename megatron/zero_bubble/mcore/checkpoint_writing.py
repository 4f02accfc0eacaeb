"""Writes checkpoints in torch_dist format; an error on one rank is raised on all ranks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common as common_strategies
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import CheckpointException

from megatron.zero_bubble.mcore.checkpoint_reading import CheckpointError, first_sentence
from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.runtime.joint import jointly

_ONLY_ON_RANK_0 = (
    # A method up to megatron-core 0.16, and a function up to 0.18; later versions write no such file.
    (getattr(common_strategies, "TorchCommonSaveStrategy", serialization), "save_common"),
    (filesystem_async.FileSystemWriterAsync, "finish"),
    (serialization, "save_config"),
)
"""The functions that write `common.pt`, `.metadata` and `metadata.json`, on rank 0 alone."""


def save(state: dict[str, Any], folder: Path, content_metadata: dict[str, Any]) -> None:
    """Write each rank's part of `state` to an empty folder; a collective call of all ranks.

    Raises:
        CheckpointError: on every rank, if any rank cannot write.
    """
    with _failures_after_the_end() as failures:
        try:
            dist_checkpointing.save(state, str(folder), content_metadata=content_metadata)
        except CheckpointException as error:
            # Raised on every rank, because the ranks have exchanged the errors of their writers.
            failures += [_reason(failure) for failure, _ in error.failures.values()]
    jointly(lambda: _raise_first(failures))


def _reason(error: BaseException) -> str:
    """Describe why a write failed, in the operating system's words where torch and megatron-core pass them on."""
    text = first_sentence(error).removeprefix("Worker failure: ")
    if "inline_container.cc" in text:
        return "a write failed, as on a full disk"
    return re.sub(r"^\[Errno \d+\] ", "", text)


def _raise_first(failures: list[str]) -> None:
    if failures:
        raise CheckpointError(failures[0])


@contextmanager
def _failures_after_the_end() -> Iterator[list[str]]:
    """Collect the errors of the files that rank 0 alone writes in a list, instead of raising them.

    If rank 0 raised them, the other ranks would wait for it for ever in megatron-core's next collective call.
    """
    failures: list[str] = []
    with ExitStack() as stack:
        for owner, name in _ONLY_ON_RANK_0:
            if hasattr(owner, name):
                stack.enter_context(replaced(owner, name, _noting(getattr(owner, name), failures)))
        yield failures


def _noting(write: Callable[..., None], failures: list[str]) -> Callable[..., None]:
    @functools.wraps(write)
    def write_or_note(*args: Any, **options: Any) -> None:
        try:
            write(*args, **options)
        except Exception as error:
            failures.append(_reason(error))

    return write_or_note
