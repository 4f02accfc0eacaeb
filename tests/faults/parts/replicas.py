"""Faults of the replicas."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="local-gradients-still-divided-by-all-replicas",
        file="mcore/replica_averaging.py",
        old="""                bucket_group.data_parallel_group = replica
                for bucket in bucket_group.buckets:
                    if not bucket_group.ddp_config.average_in_collective:
                        bucket.gradient_scaling_factor = 1.0 / replica.size()""",
        new="                bucket_group.data_parallel_group = replica",
        effect=(
            "Under hierarchical SGD, a replica's own gradients are divided by the number of all replicas, so that "
            "steps and norms are too small."
        ),
    ),
    Fault(
        name="only-the-first-part-is-averaged",
        file="runtime/group_averager.py",
        old="""    for part in _parts(tensors):
        mean =""",
        new="""    for part in list(_parts(tensors))[:1]:
        mean =""",
        effect="With more parameters than are averaged at once, replicas average only the first part.",
    ),
    Fault(
        name="per-token-loss-no-longer-refused",
        file="mcore/refused_settings.py",
        old="""        Refusal(
            "calculate_per_token_loss", "the number of tokens is summed over replicas in every step", "leave it out"
        ),
""",
        new="",
        effect=(
            "Hierarchical SGD with --calculate-per-token-loss is not refused any more, and scales gradients by "
            "the tokens of all replicas."
        ),
    ),
    Fault(
        name="sharded-gradients-divided-once-more",
        file="mcore/fully_sharded.py",
        old="""                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)""",
        new="                part.set_force_sum_reduction_for_comms(True)",
        effect=(
            "With FSDP2 and --calculate-per-token-loss, gradients are divided by the number of replicas as well "
            "as by the number of tokens."
        ),
    ),
    Fault(
        name="straggler-steps-counted-from-zero",
        file="cli/estimate/stragglers.py",
        old="    for number, durations in enumerate(times, 1):",
        new="    for number, durations in enumerate(times):",
        effect=(
            "The straggler estimate averages replicas one step late, and so predicts other times and draws other "
            "waits than a training has."
        ),
    ),
    Fault(
        name="grad-reduce-in-bf16-ignored",
        file="trainer/optimization.py",
        old="    return args.accumulate_allreduce_grads_in_fp32 or (args.bf16 and not args.grad_reduce_in_bf16)",
        new="    return args.accumulate_allreduce_grads_in_fp32 or args.bf16",
        effect="--grad-reduce-in-bf16 has no effect: gradients take twice the memory and are reduced in fp32.",
    ),
)
