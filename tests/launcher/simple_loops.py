"""The simplest loop over megatron-core, and loops that wrap, drop and train models in other ways.

Each trains a small model and returns its numbers, as the loops of `loops.py` do.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.launcher.loop_parts import (
    Numbers,
    begin,
    build_others,
    chunk_of,
    configuration,
    digest_of,
    forward_step,
    freeze_norms,
    in_ddp,
    losses_of,
    microbatches,
)


def simple_loop(num_steps: int = 3, make: Callable[[Any, int | None], Any] | None = None) -> Numbers:
    """As NVIDIA's `run_simple_mcore_train_loop.py`: torch's Adam, and gradients finalized after the step."""
    begin(1)
    config = configuration()
    teachers = build_others()
    model = in_ddp(config, [(make or chunk_of)(config, None)])
    assert not any(teacher.training for teacher in teachers)
    return simple_steps(model, num_steps)


def simple_steps(model: list[Any], num_steps: int, forward_backward: Callable[..., Any] | None = None) -> Numbers:
    """Train a model as `simple_loop` does.

    Args:
        forward_backward: megatron-core's function; None to take it here.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    optimizer = torch.optim.Adam(model[0].parameters(), lr=1e-2)
    forward_backward = forward_backward or get_forward_backward_func()
    numbers = []
    for step in range(num_steps):
        optimizer.zero_grad()
        model[0].zero_grad_buffer()
        reports = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches(step, 4)),
            model=model[0],
            num_microbatches=4,
            seq_length=12,
            micro_batch_size=2,
            decoder_seq_length=12,
            forward_only=False,
        )
        finalize_model_grads(model)
        for parameter in model[0].parameters():
            parameter.grad = parameter.main_grad if parameter.requires_grad else None
        optimizer.step()
        numbers += losses_of(reports)
    return [*numbers, digest_of(model)]


def rewrapping_loop() -> Numbers:
    """Wraps a model again after some of its parameters are no longer frozen."""
    begin(1)
    config = configuration()
    chunk = chunk_of(config, None)
    freeze_norms([chunk])
    numbers = simple_steps(in_ddp(config, [chunk]), 2)
    chunk.requires_grad_()
    return numbers + simple_steps(in_ddp(config, [chunk]), 2)


def searching_loop() -> Numbers:
    """Trains one model after the other, and drops each; ends with the numbers of models and threads that are left."""
    begin(1)
    numbers, models, num_threads = [], [], []
    for _ in range(3):
        config = configuration()
        chunk = chunk_of(config, None)
        models.append(weakref.ref(chunk))
        numbers += simple_steps(in_ddp(config, [chunk]), 2)
        num_threads.append(threading.active_count())
        del config, chunk
        gc.collect()
    alive = sum(model() is not None for model in models)
    return [*numbers, f"{alive} models, {num_threads[-1] - num_threads[0]} more threads"]


def direct_loop() -> Numbers:
    """Trains with megatron-core's function, without `get_forward_backward_func`."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving

    begin(1)
    config = configuration()
    model = in_ddp(config, [chunk_of(config, None)])
    # The second rank waits for the first rank, until the first rank ends.
    with contextlib.suppress(RuntimeError) if dist.get_rank() == 1 else contextlib.nullcontext():
        return simple_steps(model, 1, forward_backward_pipelining_without_interleaving)
    return []
