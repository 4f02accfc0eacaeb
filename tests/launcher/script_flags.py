"""Flags and parsed arguments of Megatron-LM that several tests give to the script in `checkout` or to its hooks."""

from __future__ import annotations

from argparse import Namespace

RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
UNCLIPPED = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0", "--num-layers", "6")
"""Across placements the order of adding up the norm differs, and nothing else."""
UNEVEN = ("--decoder-first-pipeline-num-layers", "4")
DRAWN = ("--keep-initial-weights", "--hidden-dropout", "0.1", "--seed", "7")
"""Weights and dropout come from random states, and not from the names of the parameters."""
GO_ON = ("--train-iters", "6")
"""For two iterations more than the training whose checkpoint is loaded."""


def script_arguments(**changed: object) -> Namespace:
    """The values of Megatron-LM's `get_args()` that the launcher reads."""
    settings = Namespace(num_layers=8, hidden_size=32, num_attention_heads=4, seq_length=16, micro_batch_size=1)
    settings.global_batch_size, settings.rampup_batch_size, settings.data_parallel_size = 8, None, 1
    settings.world_size, settings.rank, settings.tensor_model_parallel_size = 4, 0, 1
    settings.pipeline_model_parallel_size, settings.pipeline_model_parallel_layout = 4, None
    settings.virtual_pipeline_model_parallel_size = settings.num_layers_per_virtual_pipeline_stage = None
    settings.train_iters, settings.iteration = 10, 0
    vars(settings).update(changed)
    return settings
