"""Logs exact losses, gradient norms and parameter digests (`--log-numerics`)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.zero_bubble.mcore.fully_sharded import whole
from megatron.zero_bubble.runtime.joint import on_rank
from megatron.zero_bubble.session.files import write_file
from megatron.zero_bubble.session.start_up import SessionError, writing

_BEGIN = '{"iteration": '
"""The beginning of each line in the file of `--log-numerics`."""


def parameter_digest(chunks: Iterable[torch.nn.Module]) -> str:
    """Return 16 hex digits of the SHA-256 over the bytes of all parameters, in the order of `Module.parameters()`.

    If replicas hold shards of the parameters, `parameter_digest` is a collective call of the replicas.
    """
    digest = hashlib.sha256()
    for chunk in chunks:
        for parameter in chunk.parameters():
            digest.update(whole(parameter.detach()).reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class NumericsLog:
    """Writes the file of `--log-numerics` on the rank that holds the loss, with parameter digests from all ranks.

    Args:
        path: path of the file. A resumed run first removes from the file all incomplete lines and all lines of
            iterations after `iteration`.
        iteration: the iteration after which the run starts.
        log_rank: the global rank that holds the loss.

    Raises:
        SessionError: on all ranks, if the file cannot be written, or if a resumed run finds a line that `NumericsLog`
            did not write.
    """

    def __init__(self, path: str, iteration: int, log_rank: int) -> None:
        self._path = Path(path)
        self._log_rank = log_rank
        self._on_log_rank(lambda: self._drop_lines_after(iteration))

    def _on_log_rank(self, write: Callable[[], None]) -> None:
        """Run `write` on the rank that writes the file of `--log-numerics`; a collective call.

        Raises:
            SessionError: on all ranks, if the file cannot be written.
        """
        with writing("--log-numerics", self._path):
            on_rank(self._log_rank, write)

    def _drop_lines_after(self, iteration: int) -> None:
        resumes = iteration and self._path.exists()
        lines = self._path.read_text(errors="replace").splitlines() if resumes else []
        iterations = [_iteration_of(line) for line in lines]
        if None in iterations:
            raise SessionError(
                f"--log-numerics {self._path}: line {iterations.index(None) + 1} was not written by --log-numerics: "
                "a resumed job adds lines to the previous job's file: give that file or a new file"
            )
        kept = [line for line, of in zip(lines, iterations, strict=True) if of is not None and of <= iteration]
        write_file(self._path, "".join(f"{line}\n" for line in kept))

    def write(self, iteration: int, lm_loss: float | None, grad_norm: float | None, digest: str) -> None:
        """Append one iteration's line to the file of `--log-numerics`; a collective call.

        Args:
            lm_loss: the loss, on the rank that has computed the loss; None on other ranks.
            digest: the `parameter_digest` of this rank after the iteration's optimizer step.
        """
        digests: list[str] | None = [""] * dist.get_world_size() if dist.get_rank() == self._log_rank else None
        dist.gather_object(digest, digests, dst=self._log_rank)
        entry = {
            "iteration": iteration,
            "lm_loss": None if lm_loss is None else lm_loss.hex(),
            "grad_norm": None if grad_norm is None else float(grad_norm).hex(),
            "parameters": digests,
        }

        def append() -> None:
            with open(self._path, "a") as file:
                file.write(json.dumps(entry) + "\n")

        self._on_log_rank(append)


def _iteration_of(line: str) -> float | None:
    """Return the iteration of a log line; infinity for an incomplete line; None for a line of another program."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        length = min(len(line), len(_BEGIN))
        return math.inf if line[:length] == _BEGIN[:length] else None
    iteration = entry.get("iteration") if isinstance(entry, dict) else None
    return iteration if isinstance(iteration, int) else None
