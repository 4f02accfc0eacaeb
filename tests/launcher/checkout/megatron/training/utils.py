"""Printing, and what the ranks of a model agree on."""

import torch
from megatron.core import mpu


def print_rank_last(message):
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(message, flush=True)


def get_device_arch_version():
    return torch.cuda.get_device_properties(0).major


def logical_and_across_model_parallel_group(input):
    agreed = torch.tensor([int(input)])
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=mpu.get_model_parallel_group())
    return bool(agreed.item())


def reduce_max_stat_across_model_parallel_group(stat):
    largest = torch.tensor([-1.0 if stat is None else stat], dtype=torch.float32)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=mpu.get_model_parallel_group())
    return None if largest.item() == -1.0 else largest.item()
