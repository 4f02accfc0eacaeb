"""Process groups, seeds."""

import signal

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.legacy import fused_kernels
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_args


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
