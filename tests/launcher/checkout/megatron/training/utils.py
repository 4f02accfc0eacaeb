"""Printing."""

import torch


def print_rank_last(message):
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(message, flush=True)


def get_device_arch_version():
    return torch.cuda.get_device_properties(0).major
