"""Printing."""

import torch


def print_rank_last(message):
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(message, flush=True)
