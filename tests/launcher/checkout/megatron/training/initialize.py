"""Arguments, process groups, seeds."""

import argparse
import os
import signal

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.legacy import fused_kernels
from megatron.training.global_vars import set_args
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
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "adam", "sgd", "adagrad"))
    parser.add_argument("--hidden-dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sgd-momentum", type=float, default=0.9)
    switches = ("untie-embeddings-and-output-weights", "use-distributed-optimizer", "overlap-grad-reduce")
    for name in (*switches, "exit-signal-handler", "keep-initial-weights"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("save", "load", "recompute-granularity", "recompute-method"):
        parser.add_argument(f"--{name}", default=None)
    return parser.parse_args(argv)


def validate_args(args):
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.data_parallel_size = args.world_size // args.pipeline_model_parallel_size
    args.virtual_pipeline_model_parallel_size = args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage is not None:
        per_rank = args.num_layers // args.pipeline_model_parallel_size
        args.virtual_pipeline_model_parallel_size = per_rank // args.num_layers_per_virtual_pipeline_stage
    args.iteration = 0
    assert get_device_arch_version() > 0


def initialize_megatron(argv=None, allow_no_cuda=False):
    assert allow_no_cuda or torch.cuda.is_available(), "Megatron requires CUDA."
    args = parse_args(argv)
    validate_args(args)
    set_args(args)
    fused_kernels.load(args)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    if torch.cuda.device_count() > 0:
        mpu.initialize_model_parallel(
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        )
    args.signals = []
    if args.exit_signal_handler:
        signal.signal(signal.SIGTERM, lambda number, frame: args.signals.append(number))
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
