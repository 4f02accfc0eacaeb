"""Measure the memory and the communication of ZeRO 0 to 3 under a pipeline, and compare with the ZeRO paper's table.

    python -m benchmarks.zero_levels
    python -m benchmarks.zero_levels --replicas 4 --num-microbatches 4 --json

Real processes train a small GPT in bf16 with Adam under ZB-H1 over gloo, with the trainer's classes. After the second
step, each rank counts the bytes of its own states, and the data that went to collectives over replicas and to messages
of the pipeline. All figures except the size of the pipeline's messages are divided by the number P of a rank's
parameters. Communication is counted in passes: in one pass, P elements go once around the ring of replicas, and an
all-reduce takes two passes.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.zero_bubble.cli.invocation import at_least, command
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.session.flag_parser import flag
from megatron.zero_bubble.session.start_up import quiet_start_up

_FSDP = ("--use-torch-fsdp2", "--zero-bubble-reduce-every-microbatch")
_KEEPS = "--torch-fsdp2-no-reshard-after-forward"
LEVELS = {
    "0": (),
    "1": ("--use-distributed-optimizer",),
    "2": (*_FSDP, _KEEPS),
    "3": _FSDP,
    "2, reduced once": (_FSDP[0], _KEEPS),
    "3, reduced once": _FSDP[:1],
}
"""Level of ZeRO -> flags."""
_SIZES = {"hidden-size": 128, "num-attention-heads": 4, "seq-length": 32, "vocab-size": 1024, "micro-batch-size": 1}


@dataclass(frozen=True)
class LevelFlags(TableFlags):
    """what is measured"""

    pipeline_size: int = flag("pipeline ranks", 2, parse=at_least(2), metavar="P")
    replicas: int = flag("replicas of the pipeline", 2, parse=at_least(2), metavar="D")
    num_microbatches: int = flag("microbatches of a step", 1, parse=at_least(1), metavar="M")
    layers: int = flag("layers of the model", 8, parse=at_least(2), metavar="N")


class Measured(NamedTuple):
    """Memory and communication of a rank, divided by the number of its parameters, except `pipeline_bytes`."""

    after_step: float
    """Bytes of the states after the backwards, with all gradients and without gathered parameters."""
    passes: float
    sent: float
    """Bytes that the rank sends to its replicas."""
    pipeline_bytes: float
    """Total bytes of the messages that the rank sends to other stages."""


@command("benchmarks.zero_levels", LevelFlags, __doc__)
def main(flags: LevelFlags) -> None:
    quiet_start_up()
    undo = substitute_cuda()
    results = measure(flags)
    expected = {level: expectation(level, flags) for level in LEVELS}
    undo.restore()
    as_json = {level: {"measured": results[level]._asdict(), **expected[level]} for level in LEVELS}
    flags.deliver(as_json, levels_table(results, expected, markdown=flags.markdown))


def levels_table(results: dict[str, Measured], expected: dict[str, dict[str, float]], *, markdown: bool = False) -> str:
    heads = (
        "ZeRO",
        "bytes after a step",
        "table",
        "estimate of the most",
        "passes",
        "estimate",
        "table",
        "pipeline (KiB)",
    )
    rows = []
    for level, one in results.items():
        figures = expected[level]
        cells = (one.after_step, figures["known_bytes"], figures["bytes"])
        passes = (one.passes, figures["passes"], figures["known_passes"])
        rows.append((level, *(f"{cell:.2f}" for cell in (*cells, *passes)), f"{one.pipeline_bytes / 1024:.1f}"))
    return table(heads, rows, markdown=markdown)


def expectation(level: str, flags: LevelFlags) -> dict[str, float]:
    """Return, for a level, the figures of the estimate and the figures in the ZeRO paper's table."""
    from megatron.zero_bubble.session.model_states import States

    args, _ = _training(level, flags)
    states, replicas, stage = States.of(args), flags.replicas, int(level[0])
    known = [16, 4 + 12 / replicas, 2 + 14 / replicas, 16 / replicas]
    return {
        "bytes": states.bytes_a_parameter(replicas),
        "known_bytes": known[stage],
        "passes": sum(states.passes(flags.num_microbatches)),
        "known_passes": [2, 2, 2, 3][stage],
        "sent": states.sent_a_parameter(replicas, flags.num_microbatches),
    }


def measure(flags: LevelFlags) -> dict[str, Measured]:
    """Train with every level, and return the figures of the rank with the most memory."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    queue: Any = torch.multiprocessing.get_context("spawn").SimpleQueue()
    ranks = flags.pipeline_size * flags.replicas
    torch.multiprocessing.spawn(_run_rank, (flags, ranks, store.port, queue), nprocs=ranks)
    return {level: Measured(*figures) for level, figures in queue.get().items()}


def _training(level: str, flags: LevelFlags) -> tuple[Any, Any]:
    from megatron.zero_bubble.trainer.arguments import parse_arguments
    from megatron.zero_bubble.trainer.checks import complete_and_check

    words = [word for name, value in _SIZES.items() for word in (f"--{name}", str(value))]
    words += ["--num-layers", str(flags.layers), "--pipeline-model-parallel-size", str(flags.pipeline_size)]
    words += ["--global-batch-size", str(flags.num_microbatches * flags.replicas), "--train-iters", "2", "--lr", "1e-3"]
    words += ["--mock-data", "--bf16", "--grad-reduce-in-bf16", "--untie-embeddings-and-output-weights"]
    words += ["--zero-bubble-schedule", "zb-h1", *LEVELS[level]]
    size = str(flags.pipeline_size * flags.replicas)
    places = {"RANK": "0", "LOCAL_RANK": "0", **os.environ, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return complete_and_check(parse_arguments(words), places, has_cuda=False)


def _run_rank(rank: int, flags: LevelFlags, num_ranks: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    quiet_start_up()
    substitute_cuda()
    results = {}
    for number, level in enumerate(LEVELS):
        store = dist.PrefixStore(str(number), dist.TCPStore("localhost", port))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        figures: list[Any] = [None] * num_ranks
        dist.all_gather_object(figures, tuple(_train(*_training(level, flags))))
        results[level] = max(figures)
        gc.collect()
        dist.destroy_process_group()
    if rank == 0:
        queue.put(results)


def _train(args: Any, job: Any) -> Measured:
    """Train two steps, and measure the second step until the optimizer step."""
    from dataclasses import replace

    from megatron.core import parallel_state

    from megatron.zero_bubble.mcore.connections import Connections
    from megatron.zero_bubble.mcore.model_units import random_microbatch
    from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
    from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
    from megatron.zero_bubble.session.session import Session
    from megatron.zero_bubble.trainer.forward_step import make_forward_step
    from megatron.zero_bubble.trainer.initialize import initialized
    from megatron.zero_bubble.trainer.model import build_model, transformer_config
    from megatron.zero_bubble.trainer.optimization import build_optimizer

    args = replace(args, padded_vocab_size=args.vocab_size)
    with initialized(args, job.placement):
        store = WeightGradStore()
        config = transformer_config(args, 1, None)
        model = build_model(args, config, Session.to_build(job.flags, job.placement, store))
        optimizer = build_optimizer(args, model, config)
        chunks: list[Any] = list(model)
        meter = _Meter(model, optimizer, parallel_state.get_data_parallel_group())
        forward_backward = ForwardBackward(job.plan, store, Connections(meter.counting_communicator()))
        data = random_microbatch(args.vocab_size, args.micro_batch_size, args.seq_length, has_mask=False)
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            with meter:
                forward_backward(
                    forward_step_func=make_forward_step(args),
                    data_iterator=_endless(data),
                    model=model,
                    num_microbatches=args.global_batch_size // args.data_parallel_size,
                    seq_length=args.seq_length,
                    micro_batch_size=args.micro_batch_size,
                    decoder_seq_length=args.seq_length,
                )
                after_step = meter.held_bytes()
                optimizer.step()
        forward_backward.close()
        parameters = sum(parameter.numel() for chunk in model for parameter in chunk.parameters())
        return meter.measured(after_step, parameters)


def _endless(data: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield data


class _Meter(TorchDispatchMode):
    """Counts the data that this rank passes to collectives over its replicas and to messages of the pipeline."""

    def __init__(self, model: list[Any], optimizer: Any, replicas: dist.ProcessGroup) -> None:
        super().__init__()
        self._model, self._optimizer = model, optimizer
        self._ranks = dist.get_process_group_ranks(replicas)
        self._reset()

    def _reset(self) -> None:
        self._elements, self._bytes, self._pipeline_bytes = 0, 0, 0

    def __enter__(self) -> Any:
        self._reset()
        return super().__enter__()

    def held_bytes(self) -> int:
        from benchmarks.held_states import held_state_bytes

        return held_state_bytes(self._model, self._optimizer)

    def measured(self, after_step: int, parameters: int) -> Measured:
        size = len(self._ranks)
        sent = self._bytes * (size - 1) / size
        return Measured(
            after_step / parameters,
            self._elements / parameters,
            sent / parameters,
            self._pipeline_bytes,
        )

    def counting_communicator(self) -> Any:
        from megatron.zero_bubble.runtime.communicator import TorchCommunicator

        meter = self

        class CountingCommunicator(TorchCommunicator):
            def send(self, tensor: torch.Tensor, destination: int) -> Any:
                meter._pipeline_bytes += tensor.nbytes
                return super().send(tensor, destination)

        return CountingCommunicator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and self._is_of_replicas(args):
            result = func(*args, **(kwargs or {}))
            tensors = [tensor for value in args for tensor in (value if isinstance(value, list) else [value])]
            # The larger tensor of a collective is the whole tensor; each rank of the collective has a part.
            sizes = [(tensor.numel(), tensor.nbytes) for tensor in tensors if isinstance(tensor, torch.Tensor)]
            is_all_reduce = "allreduce" in func._schema.name
            whole = (sum(size[i] for size in sizes) if is_all_reduce else _larger_half(sizes, i) for i in (0, 1))
            elements, size_bytes = whole
            self._elements += elements * (2 if is_all_reduce else 1)
            self._bytes += size_bytes * (2 if is_all_reduce else 1)
            return result
        return func(*args, **(kwargs or {}))

    def _is_of_replicas(self, args: Any) -> bool:
        for value in args:
            if isinstance(value, torch.ScriptObject):
                try:
                    return dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)) == self._ranks
                except RuntimeError:  # not a process group
                    continue
        return False


def _larger_half(sizes: list[tuple[int, int]], index: int) -> int:
    """Sum the sizes of the whole tensors of a collective; one half of `sizes` has whole tensors, the other shards."""
    half = len(sizes) // 2
    return max(sum(size[index] for size in part) for part in (sizes[:half], sizes[half:]))


if __name__ == "__main__":
    sys.exit(main())
