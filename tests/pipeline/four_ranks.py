"""Trains with random shapes over four processes, under every schedule; `test_pipeline_ranks.py` starts it."""

from __future__ import annotations

from random import Random

import torch
import torch.distributed as dist
from rank_threads import accumulate_pairs, gradients_of
from test_pipeline_numerics import SCHEDULES, assert_equal
from test_pipeline_shapes import layers, random_microbatches
from torch import nn
from torch.nn.functional import mse_loss

from megatron.zero_bubble import Pipeline, PipelineOptions


def main() -> None:
    dist.init_process_group("gloo")
    for schedule in SCHEDULES:
        options = PipelineOptions(partition="uniform", microbatch_order="data")
        pipeline = Pipeline(layers(), mse_loss, schedule, 4, options)
        model, random = nn.Sequential(*layers()), Random(schedule)
        for _ in range(5):
            pairs = random_microbatches(random)
            assert torch.equal(pipeline.train_batch(iter(pairs)), accumulate_pairs(model, mse_loss, pairs))
        expected, own = gradients_of(model), gradients_of(pipeline)
        assert_equal(own, {name: expected[name] for name in own})
        pipeline.close()
        if dist.get_rank() == 0:
            print(schedule, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
