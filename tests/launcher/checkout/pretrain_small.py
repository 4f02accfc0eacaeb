"""Trains a very small GPT the way Megatron-LM's `pretrain_gpt.py` does: `python pretrain_small.py <flags>`."""

import signal
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from megatron.training.global_vars import get_args
from megatron.training.training import pretrain
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def model_provider(pre_process, post_process, vp_stage, pg_collection):
    args = get_args()
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        attention_dropout=0.0,
        hidden_dropout=args.hidden_dropout,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        args.padded_vocab_size,
        args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def data_provider(vp_stage, seed):
    """Random tokens, for the chunks that read them."""
    is_whole_rank = vp_stage is None
    if mpu.is_pipeline_first_stage(is_whole_rank, vp_stage) or mpu.is_pipeline_last_stage(is_whole_rank, vp_stage):
        args = get_args()
        tokens = RandomTokens(args, 1000 * seed + mpu.get_data_parallel_rank())
        ignore = ignore_stop_signal if args.exit_signal_handler else None
        return iter(DataLoader(tokens, batch_size=None, num_workers=args.num_workers, worker_init_fn=ignore))
    return None


class RandomTokens(IterableDataset):
    def __init__(self, args, seed):
        self._shape, self._seed = (args.micro_batch_size, args.seq_length + 1), seed
        self._vocabulary = args.padded_vocab_size

    def __iter__(self):
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(self._seed + (500 * worker.id if worker else 0))
        while True:
            yield torch.randint(self._vocabulary, self._shape, generator=generator)


def ignore_stop_signal(worker):
    signal.signal(signal.SIGTERM, lambda number, frame: None)


def loss_func(output):
    loss, count = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count])}


def forward_step(data_iterator, model):
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    is_whole_rank = vp_stage is None
    tokens = labels = None
    if mpu.is_pipeline_first_stage(is_whole_rank, vp_stage) or mpu.is_pipeline_last_stage(is_whole_rank, vp_stage):
        batch = next(data_iterator)
        tokens, labels = batch[:, :-1], batch[:, 1:]
    length = get_args().seq_length
    positions = torch.arange(length).unsqueeze(0)
    mask = torch.ones(length, length).tril().logical_not().view(1, 1, length, length)
    return model(tokens, positions, mask, labels=labels), partial(loss_func)


if __name__ == "__main__":
    pretrain(model_provider, forward_step, data_provider)
