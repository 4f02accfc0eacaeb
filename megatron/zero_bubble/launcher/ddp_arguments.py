"""Changes the arguments that a script passes to megatron-core's DistributedDataParallel (DDP).

From megatron-core 0.18 on, a script with a distributed optimizer computes each parameter's position in DDP's buffers
before the script wraps the model in DDP. The launcher shards the vocabulary before the script computes the positions of
parameters, because sharding replaces parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from megatron.zero_bubble.launcher.hooks import Call


def shard_before_layout(call: Call, chunks: Sequence[torch.nn.Module], shard: Callable[[], None]) -> None:
    """Shard the vocabulary of a model, and pass the new parameters to a call of `compute_full_param_layout`.

    Args:
        call: the call of `compute_full_param_layout`. The argument `params` of the call is replaced if `params` is the
            list of trainable parameters of a chunk in `chunks`; otherwise, the call is not changed.
        chunks: the model's chunks on this rank.
        shard: function that shards the vocabulary of `chunks`; a collective call of the pipeline's ranks.
    """
    given = [id(parameter) for parameter in call["params"]]
    chunk = next((chunk for chunk in chunks if [id(parameter) for parameter in _trainable(chunk)] == given), None)
    if chunk is not None:
        shard()
        call["params"] = _trainable(chunk)


def defer_in_ddp(call: Call, **more: bool) -> None:
    """Set `delay_wgrad_compute` in a call of DDP's constructor, so that W calls the DDP hooks that reduce gradients.

    With `align_param_gather`, megatron-core's own schedules would start the gathers of parameters. `align_param_gather`
    is unset, so that DDP itself starts the gather of a bucket when the bucket before is in use.

    The changed copy of DDP's configuration is not checked again, because the check would refuse a bucket size that
    megatron-core has computed from `num_buckets`.

    Args:
        call: the call of DDP's constructor.
        more: further fields of `ddp_config` to set, with their values.
    """
    call["ddp_config"] = config = copy.copy(call["ddp_config"])
    vars(config).update(delay_wgrad_compute=True, align_param_gather=False, **more)


def construct_ddp(call: Call, **more: bool) -> None:
    """Construct DDP on the default CUDA stream; the arguments are as in `defer_in_ddp`.

    Megatron-LM and Megatron-Bridge construct DDP on a separate stream. If DDP is constructed on a separate stream,
    autograd accumulates the gradients of biases and norms on that stream, but W accumulates the gradients of split
    layers on the default stream. The hook that completes a bucket starts the bucket's reduction. The reduction waits
    only for the stream of the hook, and could start before the gradients on another stream are complete.
    `construct_ddp` constructs DDP on the default stream, so that one stream accumulates all gradients.
    """
    defer_in_ddp(call, **more)
    # A stage of a layout may have no parameters.
    device = next((parameter.device for parameter in call["module"].parameters()), torch.device("cpu"))
    with torch.cuda.stream(torch.cuda.default_stream(device) if device.type == "cuda" else None):
        call.proceed()


def _trainable(chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in chunk.parameters() if parameter.requires_grad]
