"""Counts the bytes of a rank's model states: parameters, gradients and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Parameters(NamedTuple):
    """Parameter counts of one rank. Experts count separately, because they may have fewer copies than other layers."""

    dense: int
    expert: int

    def __add__(self, other: Parameters) -> Parameters:  # type: ignore[override]
        return Parameters(self.dense + other.dense, self.expert + other.expert)


class ReplicaCounts(NamedTuple):
    """Numbers of ranks that hold the same parameters."""

    dense: int
    """The data-parallel size times the context-parallel size."""
    expert: int
    """Number of ranks that hold the same experts: the number of ranks of a stage, divided by the expert-parallel size
    and by the tensor-parallel size of the experts."""

    @classmethod
    def of(cls, args: Any) -> ReplicaCounts:
        """Compute the numbers from the parallel sizes in `args`."""
        expert_ranks = args.expert_model_parallel_size * (
            args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        )
        stage_ranks = args.world_size // args.pipeline_model_parallel_size
        return cls(args.data_parallel_size * args.context_parallel_size, max(1, stage_ranks // expert_ranks))


def element_bytes(args: Any) -> int:
    """Bytes of one element of an activation or parameter in the data type in which the model computes."""
    return 2 if args.bf16 or args.fp16 else 4


@dataclass(frozen=True)
class States:
    """Bytes per parameter that a rank stores, and bytes that it sends to other replicas, under a given ZeRO stage.

    ZeRO (Rajbhandari et al. 2020) divides the optimizer's state among the data-parallel ranks from stage 1 on, the
    gradients from stage 2 on, and the parameters in stage 3. Context-parallel ranks count as data-parallel ranks. In
    mixed precision a parameter takes 2 bytes; a gradient takes 2 bytes, or 4 if gradients accumulate in fp32. Adam's
    state of a parameter takes 12 bytes (an fp32 copy and two moments), or less with `--use-precision-aware-optimizer`.
    SGD keeps one moment with momentum, and none without; every other optimizer is counted as Adam. A layer-wise
    optimizer is counted as ZeRO stage 1. States that the optimizer keeps on the host are not counted. A sharded
    optimizer may have several instances (groups of data-parallel ranks); each instance divides the whole state among
    the ranks of the instance. Post-validation with a snapshot on the device keeps the optimizer's state twice.
    """

    parameter: int
    gradient: int
    optimizer: float
    """Bytes of the optimizer's states per parameter, including post-validation's snapshot if it is on the device."""
    zero_stage: int
    instances: int = 1
    """Number of groups of replicas; the ranks of each group together hold one whole copy of the optimizer states."""
    sums_whole_gradients: bool = False
    """Whether gradients are divided among replicas only after they are summed over the microbatches of a step."""
    keeps_shards: bool = False
    """Whether a rank in ZeRO stage 2 keeps its shard beside the gathered parameters, as with torch's FSDP2."""

    @classmethod
    def of(cls, args: Any, zero_stage: int | None = None) -> States:
        """Compute the bytes from the flags in `args`; the argument `zero_stage` overrides the ZeRO stage of the flags.

        `args` may lack flags that are newer than Megatron-LM 0.9, and flags that only the trainer has.
        """
        size = element_bytes(args)
        reduces_in_bf16 = getattr(args, "grad_reduce_in_bf16", False)
        in_fp32 = args.accumulate_allreduce_grads_in_fp32 or (args.bf16 and not reduces_in_bf16) or size == 4
        num_moments = int(args.sgd_momentum > 0) if args.optimizer == "sgd" else 2
        snapshot = args.zero_bubble_post_validation and args.zero_bubble_rollback != "inverse"
        own: float = (4 if size == 2 else 0) + 4 * num_moments
        if getattr(args, "use_precision_aware_optimizer", False):
            own = _precision_aware(args)
        if getattr(args, "optimizer_cpu_offload", False):
            own *= 1 - args.optimizer_offload_fraction
        optimizer = own + (own + (4 if size == 4 else 0) if snapshot and not args.zero_bubble_rollback_on_host else 0)
        flags_stage = _zero_stage(args)
        is_fsdp = flags_stage >= 2 and zero_stage in (None, flags_stage)
        return cls(
            size,
            4 if in_fp32 else size,
            optimizer,
            flags_stage if zero_stage is None else zero_stage,
            getattr(args, "num_distributed_optimizer_instances", 1),
            sums_whole_gradients=is_fsdp and not args.zero_bubble_reduce_every_microbatch,
            keeps_shards=is_fsdp,
        )

    def bytes_a_parameter(self, replicas: int) -> float:
        """Return the peak bytes that a rank holds for each parameter if `replicas` ranks hold the same parameters.

        Parameters that ZeRO stage 3 gathers temporarily for a layer are not counted.
        """
        shards = max(1, replicas // self.instances)
        optimizer = self.optimizer / (shards if self.zero_stage >= 1 else 1)
        gradient: float = self.gradient
        if self.zero_stage >= 2 and not self.sums_whole_gradients:
            # FSDP2 keeps reduced gradients in the data type of the parameters.
            gradient = (self.parameter if self.keeps_shards else self.gradient) / shards
        parameter = self.parameter / (shards if self.zero_stage >= 3 else 1)
        if self.zero_stage == 2 and self.keeps_shards:
            parameter += self.parameter / shards
        return parameter + gradient + optimizer

    def passes(self, num_microbatches: int) -> tuple[int, int]:
        """Return how often per step the replicas exchange all gradients, and how often they exchange all parameters.

        An all-reduce counts as two exchanges; a reduce-scatter or an all-gather counts as one exchange. ZeRO stage 3
        gathers parameters for the F and for the B of every microbatch. From ZeRO stage 2 on, gradients are reduced
        after every microbatch unless `sums_whole_gradients` is set.
        """
        reductions = num_microbatches if self.zero_stage >= 2 and not self.sums_whole_gradients else 1
        return [(2, 0), (1, 1), (reductions, 1), (reductions, 2 * num_microbatches)][self.zero_stage]

    def sent_a_parameter(self, replicas: int, num_microbatches: int) -> float:
        """Return the bytes that a rank sends in a step for each parameter if `replicas` ranks hold the same parameters.

        In one exchange among d ranks, each rank sends (d - 1) / d of the bytes: all except the rank's own part.
        """
        gradients, parameters = self.passes(num_microbatches)
        shards = max(1, replicas // self.instances)
        sent = (gradients * self.gradient + parameters * self.parameter) * (shards - 1) / shards
        # The instances of a sharded optimizer all-reduce the gradient shards among each other.
        return sent + 2 * self.gradient / shards * (self.instances - 1) / self.instances

    def of_rank(self, parameters: Parameters, replicas: ReplicaCounts) -> float:
        """Return the bytes of a rank's model states."""
        return sum(number * self.bytes_a_parameter(ranks) for number, ranks in zip(parameters, replicas, strict=True))

    def sent_by_rank(self, parameters: Parameters, replicas: ReplicaCounts, num_microbatches: int) -> float:
        """Return the bytes that a rank sends to other replicas in a step."""
        each = (self.sent_a_parameter(ranks, num_microbatches) for ranks in replicas)
        return sum(number * sent for number, sent in zip(parameters, each, strict=True))


def _precision_aware(args: Any) -> int:
    """Bytes per parameter of the optimizer's main copy plus Adam's two moments, in the data types of the flags.

    By default the fp32 main copy of a bf16 parameter takes only 2 bytes, because the parameter holds the other 2 bytes.
    """
    dtypes = [getattr(args, name) for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")]
    # A data type is one of Megatron-LM's names or a `torch.dtype`.
    copied, *moments = ({"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}.get(dtype) or dtype.itemsize for dtype in dtypes)
    has_remainders = args.bf16 and copied == 4 and not getattr(args, "no_store_param_remainders", False)
    return (2 if has_remainders else copied) + sum(moments)


def _zero_stage(args: Any) -> int:
    if getattr(args, "use_torch_fsdp2", False):
        return 2 if args.torch_fsdp2_no_reshard_after_forward else 3
    sharded = ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer")
    return int(any(getattr(args, name, False) for name in sharded))
