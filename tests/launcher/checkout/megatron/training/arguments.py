"""Arguments, parsed and validated."""

import argparse
import os

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training.utils import get_device_arch_version

_NUMBERS = {
    "num-layers": 4,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 16,
    "micro-batch-size": 1,
    "global-batch-size": 4,
    "train-iters": 4,
    "log-interval": 1,
    "eval-iters": 1,
    "exit-interval": None,
    "num-workers": 2,
    "pipeline-model-parallel-size": 1,
    "num-layers-per-virtual-pipeline-stage": None,
    "num-virtual-stages-per-pipeline-rank": None,
    "recompute-num-layers": None,
    "decoder-first-pipeline-num-layers": None,
}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "adam", "sgd", "adagrad", "muon"))
    parser.add_argument("--hidden-dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sgd-momentum", type=float, default=0.9)
    switches = ("untie-embeddings-and-output-weights", "use-distributed-optimizer", "overlap-grad-reduce")
    for name in (
        *switches,
        "exit-signal-handler",
        "log-throughput",
        "keep-initial-weights",
        "varied-lengths",
        "packed",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    names = ("save", "load", "pipeline-model-parallel-layout", "recompute-granularity", "recompute-method")
    for name in (*names, "hybrid-override-pattern", "spec"):
        parser.add_argument(f"--{name}", default=None)
    parser.add_argument("--streams", nargs="?", const="by setting", default=None)
    return parser.parse_args(argv)


def validate_args(args):
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.data_parallel_size = args.world_size // args.pipeline_model_parallel_size
    args.virtual_pipeline_model_parallel_size = args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage is not None:
        per_rank = args.num_layers // args.pipeline_model_parallel_size
        args.virtual_pipeline_model_parallel_size = per_rank // args.num_layers_per_virtual_pipeline_stage
    if args.pipeline_model_parallel_layout is not None:
        num_stages = PipelineParallelLayerLayout.get_num_stages_from_str(args.pipeline_model_parallel_layout)
        per_rank = num_stages // args.pipeline_model_parallel_size
        args.virtual_pipeline_model_parallel_size = per_rank if per_rank > 1 else None
    spreads = ("num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers")
    if not any(getattr(args, name) for name in (*spreads, "pipeline_model_parallel_layout")):
        assert args.num_layers % args.pipeline_model_parallel_size == 0, "the ranks must divide the layers"
    args.iteration = 0
    args.padded_vocab_size = 128  # Megatron-LM pads that of the tokenizer.
    assert get_device_arch_version() > 0
