"""Writes the file of `--log-numerics`: a JSON line of exact values for each iteration, to compare runs bitwise."""

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
from megatron.zero_bubble.session.start_up import SessionError


def parameter_digest(chunks: Iterable[torch.nn.Module]) -> str:
    """First 16 hex digits of the SHA-256 over the bytes of all parameters, in the order of the model's names.

    A collective call of the replicas if each holds a shard of the parameters.
    """
    digest = hashlib.sha256()
    for chunk in chunks:
        for parameter in chunk.parameters():
            digest.update(whole(parameter.detach()).reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class NumericsLog:
    """Writes the file on the rank that holds the loss, with digests from all ranks.

    Args:
        path: the file. Lines of iterations after `iteration` and an incomplete line, which a killed run may have
            left, are dropped, so that a resumed run ends with the same file as one that never stopped.
        iteration: the iteration after which the run starts.
        log_rank: the global rank that holds the loss.
    """

    def __init__(self, path: str, iteration: int, log_rank: int) -> None:
        self._path = Path(path)
        self._log_rank = log_rank
        self._writes = dist.get_rank() == log_rank
        self._on_log_rank(lambda: self._drop_lines_after(iteration))

    def _on_log_rank(self, write: Callable[[], None]) -> None:
        """Run `write` on the rank that writes the file; a collective call.

        Raises:
            SessionError: on all ranks, if the file cannot be written.
        """
        try:
            on_rank(self._log_rank, write)
        except OSError as error:
            raise SessionError(f"--log-numerics {self._path} cannot be written: {error.strerror}") from error

    def _drop_lines_after(self, iteration: int) -> None:
        lines = self._path.read_text().splitlines() if iteration and self._path.exists() else []
        kept = [line for line in lines if _iteration_of(line) <= iteration]
        self._path.write_text("".join(f"{line}\n" for line in kept))

    def write(self, iteration: int, lm_loss: float | None, grad_norm: float | None, digest: str) -> None:
        """Write the line of an iteration; a collective call.

        Args:
            lm_loss: the loss on the rank that holds it, None on other ranks.
            digest: the `parameter_digest` of this rank after the iteration's step.
        """
        digests: list[str] | None = [""] * dist.get_world_size() if self._writes else None
        dist.gather_object(digest, digests, dst=self._log_rank)
        entry = {
            "iteration": iteration,
            "lm_loss": None if lm_loss is None else lm_loss.hex(),
            "grad_norm": None if grad_norm is None else float(grad_norm).hex(),
            "parameters": digests,
        }
        self._on_log_rank(lambda: self._append(json.dumps(entry) + "\n"))

    def _append(self, line: str) -> None:
        with open(self._path, "a") as file:
            file.write(line)


def _iteration_of(line: str) -> float:
    """The iteration of a line; infinity for an incomplete line, which a killed run leaves at the end."""
    try:
        return json.loads(line)["iteration"]
    except json.JSONDecodeError:
        return math.inf
