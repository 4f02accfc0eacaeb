"""Flags of Megatron-LM that several tests give to the script in `checkout`."""

from __future__ import annotations

RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
UNCLIPPED = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0", "--num-layers", "6")
"""Across placements the order of adding up the norm differs, and nothing else."""
UNEVEN = ("--decoder-first-pipeline-num-layers", "4")
DRAWN = ("--keep-initial-weights", "--hidden-dropout", "0.1", "--seed", "7")
"""Weights and dropout come from random states, and not from the names of the parameters."""
GO_ON = ("--train-iters", "6")
"""For two iterations more than the training whose checkpoint is loaded."""
