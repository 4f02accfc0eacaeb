"""Trains with the `megatron.training` of a wheel of megatron-core: a GPT, or with a pattern of layers a hybrid model.

The wheels, from 0.18 on, lack Megatron-LM's own scripts. This one calls the `pretrain()` of each version as they do. It
takes the flags of Megatron-LM, for pipelines without tensor or context parallelism. With `--varied-lengths` each sample
has a length of its own.
"""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import argument_utils, get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def forward_step(data_iterator: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch: dict[str, Any] = {}
    if is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage")):
        device = next(model.parameters()).device
        batch = {name: tensor.to(device) for name, tensor in next(data_iterator).items()}
    tokens, positions, labels, mask = (batch.get(name) for name in ("tokens", "position_ids", "labels", "loss_mask"))
    return model(tokens, positions, None, labels=labels), partial(loss_function, mask)


def loss_function(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    loss = torch.sum(losses.float().view(-1) * mask.view(-1))
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


class CutSamples(MockGPTDataset):
    """Mock samples, each cut to a length that depends on its number alone."""

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        sample, length = super().__getitem__(index), 3 + 5 * (index or 0) % 13
        return {name: tensor[:length] for name, tensor in sample.items()}


def datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    mock = CutSamples if args.varied_lengths else MockGPTDataset
    kind = mock if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        kind, num_samples, lambda: is_first_or_last_pipeline_stage(vp_stage), config
    ).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def build_model(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None, **more: Any
) -> torch.nn.Module:
    """The model of 0.18, whose `pretrain()` has it built; from 0.19 on Megatron builds it from a configuration."""
    args = get_args()
    options = {
        "config": config or core_transformer_config_from_args(args),
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "vp_stage": vp_stage,
        **more,
    }
    if args.hybrid_layer_pattern:
        spec = import_module(args.spec)
        return HybridModel(hybrid_stack_spec=spec, hybrid_layer_pattern=args.hybrid_layer_pattern, **options)
    if args.transformer_impl == "local":
        return GPTModel(transformer_layer_spec=get_gpt_layer_local_spec(args.num_experts), **options)
    shape = {"use_transformer_engine": True, "vp_stage": vp_stage}
    layers = get_gpt_decoder_block_spec(options["config"], normalization=args.normalization, **shape)
    further = get_gpt_mtp_block_spec(options["config"], layers, **shape) if args.mtp_num_layers else None
    return GPTModel(transformer_layer_spec=layers, mtp_block_spec=further, **options)


def model_config(args: Namespace) -> Any:
    """Megatron's configuration of the model; None where this version has none for a GPT."""
    name = "hybrid_config_from_args" if args.hybrid_layer_pattern else "gpt_config_from_args"
    from_args = getattr(argument_utils, name, None)
    return None if from_args is None else from_args(args)


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--varied-lengths", action="store_true")
    return parser


def main() -> None:
    defaults = {"tokenizer_type": "NullTokenizer"}
    args = parse_and_validate_args(extra_args_provider=add_flags, args_defaults=defaults)
    # Megatron has no flag for it: scripts set it whose data has samples of several lengths.
    args.variable_seq_lengths = args.varied_lengths
    config = argument_utils.pretrain_cfg_container_from_args(args, model_config(args))
    # Optional since 0.19, where only an unusual script gives it.
    provider = inspect.signature(pretrain).parameters["model_provider"]
    pretrain(
        cfg_container=config,
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        **({"model_provider": build_model} if provider.default is provider.empty else {}),
    )


if __name__ == "__main__":
    main()
