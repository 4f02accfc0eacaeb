"""Makes what averages replicas and measures their waits, for the trainer and the launcher alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer

from megatron.zero_bubble.mcore.replica_averaging import ReplicaAveraging
from megatron.zero_bubble.runtime.device import own_device
from megatron.zero_bubble.runtime.recorder import device_clock
from megatron.zero_bubble.runtime.replica_waits import ReplicaWaits, Waits
from megatron.zero_bubble.session.hierarchy_flags import FLAG
from megatron.zero_bubble.session.reports import describe_hierarchy, print_rank_0
from megatron.zero_bubble.session.settings import JobSettings


class Replicas:
    """The replicas of this rank's part of the model: averages them if the flags say so, and measures their waits.

    Made before the first step; a collective call of all ranks. With a single replica it does nothing.

    Args:
        chunks: this rank's modules in DDP.
        iteration: the iteration after which the job begins.
        changed: called when parameters or the optimizer's moments have been averaged.

    Raises:
        ValueError: `--hierarchical-sgd` does not work with the optimizer.
    """

    def __init__(
        self,
        job: JobSettings,
        optimizer: MegatronOptimizer,
        chunks: Sequence[Any],
        iteration: int,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._averaging: ReplicaAveraging | None = None
        if job.hierarchy is not None:
            timeout = timedelta(minutes=job.flags.distributed_timeout_minutes)
            try:
                self._averaging = ReplicaAveraging(job.hierarchy, optimizer, chunks, iteration, timeout, changed)
            except ValueError as error:
                raise ValueError(f"{FLAG} {job.flags.hierarchical_sgd}: {error}") from error
            print_rank_0(describe_hierarchy(job.hierarchy))
        group = parallel_state.get_data_parallel_group()
        device = own_device()
        self._num_replicas = group.size()
        self._waits = ReplicaWaits(group, device_clock(device), device)
        for chunk in chunks if self._num_replicas > 1 else ():
            chunk.finish_grad_sync = self._measured(chunk.finish_grad_sync)

    def _measured(self, reduce: Callable[..., None]) -> Callable[..., None]:
        @wraps(reduce)
        def measured(*args: Any, **kwargs: Any) -> None:
            with self._waits.measured():
                reduce(*args, **kwargs)

        return measured

    @property
    def is_local(self) -> bool:
        """Whether the next iteration's loss, norm and step are this replica's own."""
        return self._averaging is not None and self._averaging.is_local

    def changes_after(self, iteration: int) -> bool:
        """Whether `after_step(iteration)` averages parameters, or ends the synchronous steps.

        Such a step must be valid, and the next iteration not have begun.
        """
        if self._averaging is None:
            return False
        hierarchy = self._averaging.hierarchy
        return hierarchy.group_size_after(iteration) is not None or iteration == hierarchy.warmup

    def after_step(self, iteration: int) -> None:
        """Average what is due after the step of `iteration`; a collective call of the group that averages."""
        size = self._num_replicas
        if self._averaging is not None and self._averaging.hierarchy.is_local(iteration):
            size = self._averaging.hierarchy.group_size_after(iteration) or 1
        if self._averaging is not None:
            with self._waits.measured():
                self._averaging.after_step(iteration)
        if self._num_replicas > 1:
            self._waits.end_iteration(size)

    def average_all(self, iteration: int, *, with_states: bool = False) -> None:
        """Give all replicas the same parameters and, for a checkpoint, the same state of the optimizer."""
        if self._averaging is not None:
            self._averaging.average_all(iteration, with_states=with_states)

    def take_waits(self) -> Waits | None:
        """The waits since the last call; None without an iteration since, or with a single replica.

        A collective call of the replicas.
        """
        return self._waits.take() if self._num_replicas > 1 else None
