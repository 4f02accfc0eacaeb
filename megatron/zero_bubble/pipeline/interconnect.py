"""Connections between the ranks of a pipeline: channels between neighbours, and collectives of several ranks."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.collectives import Collectives, TorchCollectives
from megatron.zero_bubble.runtime.communicator import Communicator, TorchCommunicator
from megatron.zero_bubble.runtime.joint import attempt, raise_first
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.errors import one_line

T = TypeVar("T")

HOST = torch.device("cpu")


class Interconnect:
    """The connections of one rank over torch.distributed; ranks are numbered within the pipeline, not within the job.

    Args:
        group: process group of the pipeline's ranks, in the order of the pipeline.
        device: the device that holds layers and messages.
        timeout: the longest time that a message or a collective may take.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self._global_ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self._global_ranks)
        self.device, self._timeout = device, timeout
        self._open: list[TorchCommunicator | TorchCollectives] = []

    def communicator(self, placement: Placement, device: torch.device | None = None) -> Communicator:
        """Open channels between neighbouring stages for tensors on `device`; a collective call of all ranks.

        If `device` is None, the channels are for tensors on `self.device`.
        """
        device = device or self.device
        communicator = TorchCommunicator(self._global_ranks, self.rank, placement, device, self._timeout)
        self._open.append(communicator)
        return communicator

    def collectives(self, members: Sequence[int], device: torch.device) -> Collectives:
        """Return `Collectives` of the ranks `members`, for tensors on `device`; a collective call of these ranks.

        Args:
            members: the ranks, in ascending order.
            device: device of the tensors.
        """
        ranks = [self._global_ranks[member] for member in members]
        collectives = TorchCollectives(ranks, list(members).index(self.rank), device, self._timeout)
        self._open.append(collectives)
        return collectives

    def of_one_pipeline(self) -> Interconnect:
        """Return an `Interconnect` of the same ranks, whose `close` leaves the connections of other pipelines open."""
        own = copy(self)
        own._open = []
        return own

    def close(self) -> None:
        """Close all channels and collectives; no message may be in flight."""
        for connection in self._open:
            connection.close()
        self._open = []


def connect_ranks(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> Interconnect:
    """Connect the ranks of a pipeline over torch.distributed.

    Args:
        group: process group of the pipeline's ranks, by default all ranks of the job.
        device: the device that holds layers and messages: the CPU or the current GPU. The default is the current
            GPU if `group` sends tensors of GPUs over NCCL, and otherwise the CPU.
        timeout: how long a rank waits for a message or a collective before the job fails.

    Raises:
        ValueError: torch.distributed is not initialized, or `device` is a GPU other than the current one.
    """
    if not dist.is_initialized():
        raise ValueError("a Pipeline needs torch.distributed: call init_process_group first, under torchrun")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group of the pipeline: give the group that has this rank")
    if device is None:
        # A group may have one backend for each type of device, and no single name.
        uses_gpu = torch.cuda.is_available() and "cuda:nccl" in dist.get_backend_config(group).split(",")
        device = torch.device("cuda", torch.cuda.current_device()) if uses_gpu else HOST
    device = torch.device(device)
    if device.type == "cuda":
        current = torch.device("cuda", torch.cuda.current_device())
        if device.index not in (None, current.index):
            raise ValueError(
                f"device={str(device)!r} is not the current GPU, {current}, on whose current stream a Pipeline "
                f"computes: call torch.cuda.set_device({device.index}) first"
            )
        device = current
    return Interconnect(group or dist.distributed_c10d._get_default_group(), device, timeout)


@dataclass(frozen=True)
class _Unsendable:
    """Sent by a rank in place of a value that cannot be pickled."""

    problem: str


class Agreement:
    """Exchanges values among all ranks of a pipeline, and raises an error of one rank on all ranks.

    Each `Agreement` has its own `Collectives`; creating an instance is a collective call of all ranks.
    """

    def __init__(self, interconnect: Interconnect) -> None:
        self._collectives = interconnect.collectives(range(interconnect.size), HOST)
        self._is_closed = False

    def close(self) -> None:
        """Close this `Agreement`: its other methods raise `ValueError` from now on."""
        self._is_closed = True

    def check_open(self) -> None:
        """Raise `ValueError` if this `Agreement` is closed."""
        if self._is_closed:
            raise ValueError("the pipeline is closed: make another one, or call close() later")

    def gather(self, value: T) -> list[T]:
        """Return the values that all ranks pass to `gather`, in the order of the ranks; a collective call.

        Raises:
            ValueError: on all ranks, if the value of a rank cannot be pickled.
        """
        self.check_open()
        try:
            pickled = pickle.dumps(value)
        except Exception as error:
            pickled = pickle.dumps(_Unsendable(f"{type(error).__name__}: {one_line(error)}"))
        data = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        # On the host, whatever torch's default device is.
        sizes = torch.zeros(self._collectives.size, 1, dtype=torch.int64, device=HOST)
        self._collectives.gather_all(torch.tensor([len(data)], device=HOST), sizes)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=HOST)
        padded[: len(data)] = data
        gathered = torch.zeros(self._collectives.size, len(padded), dtype=torch.uint8, device=HOST)
        self._collectives.gather_all(padded, gathered)
        values = [
            pickle.loads(row[:size].numpy().tobytes())
            for row, size in zip(gathered, sizes.flatten().tolist(), strict=True)
        ]
        for rank, value in enumerate(values):
            if isinstance(value, _Unsendable):
                raise ValueError(
                    f"rank {rank} cannot describe its part to the other ranks: {value.problem}: a class must be "
                    "defined at the top of a module"
                )
        return values

    def collect(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return the results of all ranks; a collective call.

        Raises:
            ValueError: `action` raises a `ValueError` or an `OSError` on some rank. Every rank then raises the error of
                the failed rank with the lowest number.
        """
        outcome = attempt(action)
        outcomes = self.gather(outcome)
        raise_first((error for _, error in outcomes), outcome[1])
        return [cast(T, result) for result, _ in outcomes]

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank and return only this rank's result; raises the same errors as `collect`."""
        results: list[T] = []
        self.collect(lambda: results.append(action()))
        return results[0]

    def raise_any(self, error: Exception | None) -> None:
        """Raise the same error on all ranks if `error` is not None on some rank; a collective call.

        Of all ranks with an error, the rank with the lowest number determines which error is raised.
        """
        raise_first(self.gather(error), error)

    def on(self, rank: int, action: Callable[[], T]) -> T:
        """Run `action` only on `rank`, and return the result on every rank; raises the same errors as `collect`."""
        return cast(T, self.collect(lambda: action() if self._collectives.rank == rank else None)[rank])


def refuse_shared_gpu(agreement: Agreement, device: torch.device) -> None:
    """Raise `ValueError` on all ranks if two ranks use one GPU although they see several; a collective call.

    Neither torchrun nor `init_process_group` sets the current GPU of a rank.
    """
    sees_several = device.type == "cuda" and torch.cuda.device_count() > 1
    # Versions of torch without `uuid` are not checked.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if sees_several else None
    places = agreement.gather(uuid and (socket.gethostname(), str(uuid)))
    for rank, place in enumerate(places):
        if place is not None and (first := places.index(place)) < rank:
            raise ValueError(
                f"ranks {first} and {rank} both use the GPU {device}: call "
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the Pipeline is made'
            )
