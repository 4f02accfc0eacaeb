"""The drop-in replacement for megatron-core's `get_forward_backward_func`.

    store = WeightGradStore()
    split_weight_gradients(model_chunks, store)                  # before DDP
    forward_backward = get_forward_backward_func("zb-h1", store)
    losses = forward_backward(forward_step_func=..., data_iterator=..., model=..., ...)

`forward_backward` takes the keyword arguments of megatron-core's forward-backward function. After a step, as with
megatron-core's function, all gradients are in `main_grad`, and `config.finalize_model_grads_func` has run.
"""

from __future__ import annotations

from datetime import timedelta

from megatron.core import parallel_state

from megatron.zero_bubble.mcore.connections import DEFAULT_TIMEOUT, Connections
from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule.recomputation import Recompute


def get_forward_backward_func(
    schedule: str | RunSchedules,
    store: WeightGradStore,
    timeout: timedelta = DEFAULT_TIMEOUT,
    recompute: str | None = None,
    *,
    vocabulary_parallel: bool = False,
    orders_microbatches: bool | None = None,
) -> ForwardBackward:
    """Return a function that replaces megatron-core's forward-backward function and runs a step with `schedule`.

    megatron-core's process groups must exist before the call.

    Args:
        schedule: name of a schedule (see `planner.names()`), or a `RunSchedules` with the schedules of a run.
        store: the store that was given to `split_weight_gradients` together with the model.
        timeout: longest wait for one message between two stages.
        recompute: "full" for a model with `recompute_granularity="full"`: the schedule then recomputes activations in a
            separate operation R, and not within B. If `recompute` is None, `schedule` determines the recomputation.
        vocabulary_parallel: whether `shard_vocabulary` has spread the model's vocabulary over the ranks.
        orders_microbatches: whether microbatches of different lengths run in an order that is planned for each step; by
            default only if `config.variable_seq_lengths` is on. The results of the microbatches are returned in the
            order of the data.

    Raises:
        ScheduleError: no schedule has the given name, or the numbers of chunks of the schedule and of `store` differ.
    """
    if isinstance(schedule, str):
        num_ranks = parallel_state.get_pipeline_model_parallel_world_size()
        schedule = RunSchedules.named(schedule, num_ranks, store.num_chunks if store.num_chunks > 1 else None)
    if recompute is not None:
        schedule = schedule.requesting(recomputes=(Recompute(recompute),))
    if vocabulary_parallel:
        schedule = schedule.requesting(vocabulary_parallel=True)
    connections = Connections(timeout=timeout)
    return ForwardBackward(schedule, store, connections, orders_microbatches=orders_microbatches)
