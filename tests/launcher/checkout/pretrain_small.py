"""Trains a very small GPT the way Megatron-LM's `pretrain_gpt.py` does: `python pretrain_small.py <flags>`."""

import importlib
import signal
from functools import partial
from itertools import pairwise

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
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
        variable_seq_lengths=args.varied_lengths or args.streams == "by lengths",
        moe_token_dispatcher_type="alltoall",  # megatron-core demands it then, also of models without experts
    )
    if args.hybrid_override_pattern is not None:
        return MambaModel(
            config,
            importlib.import_module(args.spec).stack_spec,
            args.padded_vocab_size,
            args.seq_length,
            hybrid_override_pattern=args.hybrid_override_pattern,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type="learned_absolute",
            pg_collection=pg_collection,
        )
    layer = get_gpt_layer_local_spec()
    model = StreamsModel if args.streams else GPTModel
    config.enable_hyper_connections = args.streams == "by setting"
    if args.packed:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return model(
        config,
        layer,
        args.padded_vocab_size,
        args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


class StreamsModel(GPTModel):
    """A model between whose stages two streams pass, side by side in one tensor."""

    def set_input_tensor(self, input_tensor):
        [tensor] = input_tensor
        super().set_input_tensor([None if tensor is None else torch.stack(tensor.chunk(2, dim=-1)).sum(0)])

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return output if self.post_process else torch.cat([output, output.tanh()], dim=-1)


class PackedAttention(DotProductAttention):
    """Attention within each sequence of a pack, which megatron-core leaves to Transformer Engine."""

    def forward(self, query, key, value, attention_mask, *, packed_seq_params, **others):
        ends = packed_seq_params.cu_seqlens_q.tolist()
        outputs = []
        for first, end in pairwise(ends):
            parts = [part[first:end].unsqueeze(1) for part in (query, key, value)]
            outputs.append(super().forward(*parts, causal_mask(end - first), **others))
        return torch.cat(outputs)


def causal_mask(length):
    return torch.ones(length, length).tril().logical_not().view(1, 1, length, length)


def reads_data(vp_stage):
    """Whether a chunk needs the microbatch: for its tokens or labels, or because the lengths of sequences differ."""
    is_whole_rank = vp_stage is None
    is_at_an_end = mpu.is_pipeline_first_stage(is_whole_rank, vp_stage)
    is_at_an_end = is_at_an_end or mpu.is_pipeline_last_stage(is_whole_rank, vp_stage)
    return is_at_an_end or get_args().varied_lengths


def data_provider(vp_stage, seed):
    """Random tokens, for the chunks that read them."""
    if reads_data(vp_stage):
        args = get_args()
        tokens = RandomTokens(args, 1000 * seed + mpu.get_data_parallel_rank())
        ignore = ignore_stop_signal if args.exit_signal_handler else None
        return iter(DataLoader(tokens, batch_size=None, num_workers=args.num_workers, worker_init_fn=ignore))
    return None


class RandomTokens(IterableDataset):
    def __init__(self, args, seed):
        self._size, self._length, self._seed = args.micro_batch_size, args.seq_length, seed
        self._shortest = 2 if args.varied_lengths else args.seq_length
        self._vocabulary = args.padded_vocab_size

    def __iter__(self):
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(self._seed + (500 * worker.id if worker else 0))
        while True:
            length = int(torch.randint(self._shortest, self._length + 1, (), generator=generator))
            yield torch.randint(self._vocabulary, (self._size, length + 1), generator=generator)


def ignore_stop_signal(worker):
    signal.signal(signal.SIGTERM, lambda number, frame: None)


def loss_func(output):
    loss, count = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count])}


def forward_step(data_iterator, model):
    tokens = labels = pack = None
    length = get_args().seq_length
    if reads_data(get_attr_wrapped_model(model, "vp_stage")):
        batch = next(data_iterator)
        tokens, labels = batch[:, :-1], batch[:, 1:]
        length = tokens.shape[1]
    positions = torch.arange(length).unsqueeze(0)
    if get_args().packed:
        ends = torch.tensor([0, length // 2, length], dtype=torch.int32)
        longest = int(ends.diff().max())
        pack = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    output = model(tokens, positions, causal_mask(length), labels=labels, packed_seq_params=pack)
    return output, partial(loss_func)


if __name__ == "__main__":
    pretrain(model_provider, forward_step, data_provider)
