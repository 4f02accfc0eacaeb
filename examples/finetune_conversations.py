"""Fine-tune a small model on conversations of very different lengths, in your own training loop over megatron-core.

    torchrun --standalone --nproc-per-node 2 examples/finetune_conversations.py
    torchrun --standalone --nproc-per-node 2 examples/finetune_conversations.py --schedule 1f1b --microbatch-order data

The conversations are synthetic: questions about sums, in one turn or in dozens of turns. A microbatch is one
conversation, so that the longest microbatches take twenty times as long as the shortest. With `--packed 3`, a
microbatch is three conversations, which do not attend to each other. Times are measured in the first steps. For every
later step, the order of microbatches with the least waiting is planned during the previous step. With
`--microbatch-order data`, microbatches run in data order. With `--checkpoint FOLDER`, the training saves the state of
each rank at the end, and the next run continues from this state.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import megatron.zero_bubble as zb

LONGEST = 512


def conversation(generator: random.Random) -> torch.Tensor:
    """Bytes [length] of a conversation; the number of turns has a long-tailed distribution."""
    turns = []
    for _ in range(1 + int(generator.lognormvariate(0.7, 1.0))):
        first, second = generator.randrange(100), generator.randrange(100)
        turns.append(f"Q: What is {first} + {second}?\nA: {first + second}.\n")
    return torch.tensor(list("".join(turns).encode()[: LONGEST + 1]))


def microbatch(generator: random.Random, packed: int = 1) -> dict[str, torch.Tensor]:
    """Concatenated conversations: tokens and labels [1, length], and the boundaries between conversations."""
    conversations = [conversation(generator) for _ in range(packed)]
    lengths = torch.tensor([0] + [len(tokens) - 1 for tokens in conversations])
    tokens, labels = (torch.cat([each[part] for each in conversations]) for part in (slice(-1), slice(1, None)))
    return {"tokens": tokens[None], "labels": labels[None], "cu_seqlens": lengths.cumsum(0)}


def microbatches(step: int, count: int, packed: int) -> Iterator[dict[str, torch.Tensor]]:
    """The microbatches of all steps from `step` on; the microbatches of a step depend only on its number."""
    while True:
        generator = random.Random(step)
        yield from [microbatch(generator, packed) for _ in range(count)]
        step += 1


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    batch = {name: tensor.to(next(model.parameters()).device) for name, tensor in next(data).items()}
    lengths = batch["cu_seqlens"].diff()
    conversation = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    place = torch.arange(len(conversation), device=lengths.device)
    # True where attention is forbidden: to later tokens, and to other conversations.
    mask = (place[:, None] < place) | (conversation[:, None] != conversation)
    positions = place - batch["cu_seqlens"][conversation]
    losses = model(batch["tokens"], positions[None], mask[None, None], labels=batch["labels"])

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}  # megatron-core scales the loss in place

    return losses, loss_of


def forward_backward(function: Any, model: Any, data: Iterator[dict[str, torch.Tensor]], count: int) -> list[Any]:
    """Compute the gradients of a step with megatron-core's forward-backward function, or with a replacement for it."""
    return function(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=count,
        seq_length=LONGEST,
        micro_batch_size=1,
        forward_only=False,
    )


def build_stage() -> Any:
    """Build this rank's stage of a GPT of 8 layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=8,
        hidden_size=192,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=dist.get_world_size(),
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default dispatcher refuses variable lengths, even without experts
        use_cpu_initialization=not torch.cuda.is_available(),
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=LONGEST,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def with_optimizer(stage: Any, **settings: bool) -> tuple[Any, Any]:
    """Wrap a stage in megatron-core's DDP with the given settings, and build the optimizer of the stage."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = DistributedDataParallel(stage.config, DistributedDataParallelConfig(**settings), stage)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
    stage.config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="auto", help="name of docs/schedules.md")
    parser.add_argument("--microbatch-order", default="planned", choices=["planned", "data"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--packed", type=int, default=1, help="conversations of a microbatch")
    parser.add_argument("--checkpoint", type=Path, help="folder to load from, if it has a checkpoint, and to save to")
    args = parser.parse_args()
    zb.enable(args.schedule, microbatch_order=args.microbatch_order, cpu=not torch.cuda.is_available())
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(args)
    zb.disable()
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    """Train, print a line for each step, and save a checkpoint."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    model, optimizer = with_optimizer(build_stage())
    begin, file = 0, args.checkpoint and args.checkpoint / f"rank{dist.get_rank()}.pt"
    if file and file.exists():
        saved = torch.load(file, weights_only=False)
        begin = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    seconds, count = [], args.num_microbatches
    data = zb.LookAhead(microbatches(begin, count, args.packed))
    for step in range(begin, begin + args.steps):
        lengths = " ".join(str(batch["tokens"].shape[1]) for batch in data.peek(count))
        start = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(get_forward_backward_func(), model, data, count)
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        if losses:  # on the last stage
            mean = sum(each["loss"].item() for each in losses) / len(losses)
            print(f"step {step}: loss {mean:.4f}, {1000 * seconds[-1]:.0f} ms, lengths {lengths}")
    if dist.get_rank() == dist.get_world_size() - 1 and seconds:
        print(f"median step: {1000 * median(seconds[len(seconds) // 2 :]):.0f} ms in the second half")
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {"step": begin + args.steps, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file)


if __name__ == "__main__":
    main()
