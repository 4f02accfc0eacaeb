"""Counts the bytes that a rank keeps between iterations for the parameters of its part of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Parameters(NamedTuple):
    """Numbers of parameters of one rank. Experts are counted apart, because other ranks share them."""

    dense: int
    expert: int

    def __add__(self, other: Parameters) -> Parameters:  # type: ignore[override]
        return Parameters(self.dense + other.dense, self.expert + other.expert)


def element_bytes(args: Any) -> int:
    """Bytes of one element of an activation, and of a parameter that the model computes with."""
    return 2 if args.bf16 or args.fp16 else 4


@dataclass(frozen=True)
class States:
    """Bytes that a rank keeps for each parameter between iterations, and how ZeRO divides them among ranks.

    ZeRO (Rajbhandari et al. 2020): the optimizer's part is divided among the d data-parallel ranks from stage 1 on,
    the gradients from stage 2, the parameters from stage 3; context-parallel ranks count as data-parallel ones. In
    mixed precision a parameter takes 2 bytes, its gradient 2, or 4 where gradients accumulate in fp32, and Adam 12:
    the fp32 copy and two moments. SGD has one moment, or none without momentum; other optimizers count as Adam.
    Where the replicas hold several instances of a sharded optimizer, only the ranks of one instance divide it.
    Post-validation that rolls back from a snapshot on the device keeps the optimizer's part twice.
    """

    parameter: int
    gradient: int
    optimizer: int
    """Bytes of the optimizer's states, with the snapshot if there is one."""
    zero_stage: int
    instances: int = 1
    """Groups of replicas that each hold the whole of what is divided."""

    @classmethod
    def of(cls, args: Any, zero_stage: int) -> States:
        """Read Megatron's and our flags from the attributes of `args`."""
        size = element_bytes(args)
        reduces_in_bf16 = getattr(args, "grad_reduce_in_bf16", False)
        in_fp32 = args.accumulate_allreduce_grads_in_fp32 or (args.bf16 and not reduces_in_bf16) or size == 4
        num_moments = int(args.sgd_momentum > 0) if args.optimizer == "sgd" else 2
        snapshot = args.zero_bubble_post_validation and args.zero_bubble_rollback != "inverse"
        copied = 4 + 4 * num_moments if snapshot and not args.zero_bubble_rollback_on_host else 0
        optimizer = (4 if size == 2 else 0) + 4 * num_moments + copied
        instances = getattr(args, "num_distributed_optimizer_instances", 1)  # younger than Megatron-LM 0.9
        return cls(size, 4 if in_fp32 else size, optimizer, zero_stage, instances)

    def bytes_a_parameter(self, replicas: int) -> float:
        """Return the bytes that one of `replicas` ranks holds for each parameter of its part of the model."""
        shared = [self.zero_stage >= stage for stage in (3, 2, 1)]
        parts = (self.parameter, self.gradient, self.optimizer)
        replicas = max(1, replicas // self.instances)
        return sum(part / replicas if is_shared else part for part, is_shared in zip(parts, shared, strict=True))

    def of_rank(self, parameters: Parameters, replicas: int, expert_ranks: int) -> float:
        """Return the bytes of all states of a rank; `expert_ranks` of the `replicas` divide the experts among them."""
        expert = parameters.expert * self.bytes_a_parameter(max(1, replicas // expert_ranks))
        return parameters.dense * self.bytes_a_parameter(replicas) + expert
