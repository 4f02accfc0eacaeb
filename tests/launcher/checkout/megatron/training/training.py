"""Model, optimizer, training, evaluation and log line."""

import dataclasses
import sys
import time
import zlib
from datetime import datetime

import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.muon import get_megatron_muon_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import get_args
from megatron.training.initialize import initialize_megatron
from megatron.training.utils import (
    logical_and_across_model_parallel_group,
    print_rank_last,
    reduce_max_stat_across_model_parallel_group,
)

_ITERATIONS = "advanced iterations"


def pretrain(model_provider, forward_step, train_valid_test_dataset_provider, argv=None):
    initialize_megatron(argv)
    args = get_args()
    model, optimizer = setup_model_and_optimizer(model_provider)
    config = get_model_config(model[0])
    if args.load is not None:
        load_checkpoint(args, model, optimizer)
    train(args, model, config, optimizer, forward_step, train_valid_test_dataset_provider)
    if args.save is not None:
        save_checkpoint(args, model, optimizer)
    evaluate_and_print_results(args, model, forward_step, train_valid_test_dataset_provider, args.iteration)


def setup_model_and_optimizer(model_provider_func):
    model = get_model(model_provider_func)
    return model, get_optimizer(get_args(), model)


def get_model(model_provider):
    args, groups = get_args(), ProcessGroupCollection.use_mpu_process_groups()
    size = args.virtual_pipeline_model_parallel_size
    model = []
    for stage in range(size or 1):
        vp_stage = stage if size is not None else None
        chunk = model_provider(
            is_pp_first_stage(groups.pp) and is_vp_first_stage(vp_stage, size),
            is_pp_last_stage(groups.pp) and is_vp_last_stage(vp_stage, size),
            vp_stage,
            groups,
        )
        chunk.vp_stage = vp_stage
        if not args.keep_initial_weights:
            initialize_by_name(chunk)
        model.append(chunk)
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=args.overlap_grad_reduce,
        use_distributed_optimizer=args.use_distributed_optimizer,
        bucket_size=4000 if args.overlap_grad_reduce else None,
    )
    config = get_model_config(model[0])
    return [
        DDP(config=config, ddp_config=dataclasses.replace(ddp_config), module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(model)
    ]


def get_optimizer(args, model):
    config = OptimizerConfig(
        optimizer="sgd" if args.optimizer == "sgd" else "adam",
        sgd_momentum=args.sgd_momentum,
        decoupled_weight_decay=args.optimizer == "adamw",
        lr=args.lr,
        clip_grad=args.clip_grad,
        use_distributed_optimizer=args.use_distributed_optimizer,
        params_dtype=torch.float32,
    )
    if args.optimizer == "muon":
        return get_megatron_muon_optimizer(config, model)
    optimizer = get_megatron_optimizer(config, model)
    if args.optimizer == "adagrad":
        for part in optimizer.chained_optimizers:
            part.optimizer = torch.optim.Adagrad(part.optimizer.param_groups)
    return optimizer


def initialize_by_name(chunk):
    """The same model wherever its layers are."""
    for name, parameter in chunk.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number)
        if parts[-1] == "weight" and parameter.dim() > 1:
            name = "table" if parts[-2] in ("word_embeddings", "output_layer") else ".".join(parts)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.normal_(std=0.05, generator=generator)


def train(args, model, config, optimizer, forward_step, data_provider):
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in model]
        if len(model) == 1:
            config.no_sync_func = config.no_sync_func[0]
    config.finalize_model_grads_func = finalize_model_grads
    forward_backward_func = get_forward_backward_func()
    data = [data_provider(chunk.module.vp_stage, seed=args.iteration) for chunk in model]
    iteration, total_loss_dict = args.iteration, {}
    while iteration < args.train_iters:
        start = time.perf_counter()
        args.curr_iteration = iteration
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward_func(**step_arguments(args, forward_step, data, model), forward_only=False)
        was_updated, grad_norm, _ = optimizer.step()
        was_updated = logical_and_across_model_parallel_group(was_updated)
        grad_norm = reduce_max_stat_across_model_parallel_group(grad_norm)
        if was_updated:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        iteration += 1
        line = f" [{datetime.now()}] iteration {iteration:8d}/{args.train_iters:8d} |"
        line += f" elapsed time per iteration (ms): {(time.perf_counter() - start) * 1000:.1f} |"
        if args.log_throughput:
            line += f" throughput per GPU (TFLOP/s/GPU): {throughput(args, model, time.perf_counter() - start):.1f} |"
        loss_dict = {"lm loss": mean_loss(losses)} if mpu.is_pipeline_last_stage(ignore_virtual=True) else {}
        training_log(loss_dict, total_loss_dict, iteration, line, grad_norm)
        if args.exit_signal_handler and any_rank(bool(args.signals)):
            args.iteration = iteration
            save_checkpoint(args, model, optimizer)
            print_rank_last(f"exiting program at iteration {iteration}")
            sys.exit()
        if args.exit_interval and iteration % args.exit_interval == 0:
            print_rank_last(f"exiting program at iteration {iteration}")
            sys.exit()
    args.iteration = iteration


def throughput(args, model, seconds):
    parameters = sum(parameter.numel() for chunk in model for parameter in chunk.parameters())
    return 6 * parameters * args.seq_length * args.global_batch_size / args.data_parallel_size / seconds / 1e12


def training_log(loss_dict, total_loss_dict, iteration, line, grad_norm):
    """Add the losses to their sums since the last line; print the means if a line is due."""
    total_loss_dict[_ITERATIONS] = total_loss_dict.get(_ITERATIONS, 0) + 1
    for name, loss in loss_dict.items():
        total_loss_dict[name] = total_loss_dict.get(name, 0) + loss
    if iteration % get_args().log_interval == 0:
        count = total_loss_dict.pop(_ITERATIONS)
        for name in loss_dict:
            line += f" {name}: {(total_loss_dict.pop(name) / count).item().hex()} |"
        print_rank_last(line + (f" grad norm: {grad_norm.hex()} |" if grad_norm else ""))


def any_rank(condition):
    conditions = torch.tensor([int(condition)])
    torch.distributed.all_reduce(conditions, op=torch.distributed.ReduceOp.MAX)
    return bool(conditions.item())


def evaluate_and_print_results(args, model, forward_step, data_provider, iteration):
    forward_backward_func = get_forward_backward_func()
    data = [data_provider(chunk.module.vp_stage, seed=99) for chunk in model]
    with torch.no_grad():
        for _ in range(args.eval_iters):
            losses = forward_backward_func(**step_arguments(args, forward_step, data, model), forward_only=True)
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        print_rank_last(f" validation loss | lm loss value: {mean_loss(losses).item().hex()} |")
    else:
        print_rank_last("")


def step_arguments(args, forward_step, data, model):
    return {
        "forward_step_func": forward_step,
        "data_iterator": data if len(model) > 1 else data[0],
        "model": model,
        "num_microbatches": get_num_microbatches(),
        "seq_length": args.seq_length,
        "micro_batch_size": args.micro_batch_size,
    }


def mean_loss(losses):
    if losses[0]["lm loss"].numel() == 1:
        return torch.cat([loss["lm loss"] for loss in losses]).mean()
    total = torch.stack([loss["lm loss"] for loss in losses]).sum(dim=0)
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())
    return total[0] / total[1]
