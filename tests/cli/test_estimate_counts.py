"""The estimate counts the parameters, operations and memory that megatron-core and its optimizers have."""

from __future__ import annotations

import json

import pytest
from estimated_jobs import EIGHT, FULLY, POST_VALIDATION, SMALL, arguments, job

from megatron.zero_bubble.cli.estimate.schedule_estimate import estimate
from megatron.zero_bubble.cli.estimate_command import main
from megatron.zero_bubble.cli.trainings import one_process, rank_model
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.model_states import States
from megatron.zero_bubble.trainer.model_count import UnitCount, count_model, flops_of_sequence

LLAMA = ["--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"]
LLAMA += ["--group-query-attention", "--num-query-groups", "2", "--untie-embeddings-and-output-weights"]
MODELS = {
    "gpt": [],
    "untied": ["--untie-embeddings-and-output-weights"],
    "llama-like": LLAMA,
    "wide heads": ["--kv-channels", "20", "--ffn-hidden-size", "100"],
    "experts": ["--num-experts", "4", "--disable-bias-linear"],
    "experts in some layers": [
        *(
            "--num-experts",
            "4",
            "--disable-bias-linear",
            "--moe-layer-freq",
            "[0]*3+[1]*5",
            "--moe-ffn-hidden-size",
            "24",
        ),
        *("--moe-shared-expert-intermediate-size", "16", "--moe-router-enable-expert-bias"),
        *("--moe-router-score-function", "sigmoid"),
    ],
    "latent attention": [
        *(
            "--multi-latent-attention",
            "--q-lora-rank",
            "24",
            "--kv-lora-rank",
            "16",
            "--qk-head-dim",
            "8",
            "--qk-layernorm",
        ),
        *("--qk-pos-emb-head-dim", "4", "--v-head-dim", "12", "--position-embedding-type", "rope"),
    ],
    "prediction layers": ["--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"],
}


def count(model) -> int:
    return sum(parameter.numel() for chunk in model for parameter in chunk.parameters())


def layer(*flags: str, world_size: int = 2) -> UnitCount:
    return count_model(arguments(*flags, world_size=world_size)).layers[0]


@pytest.mark.parametrize("placement", [Placement("linear", 2), Placement("interleaved", 2, 2), Placement("v", 2, 2)])
@pytest.mark.parametrize("model", [model for model in MODELS if model != "prediction layers"])
def test_parameters_are_those_of_megatron_cores_model(model, placement):
    args = arguments(*MODELS[model])
    with one_process(args):
        real = [count(rank_model(args, placement, rank, None)) for rank in range(placement.num_ranks)]
    estimated = job(*SMALL, *MODELS[model], tool=["--world-size", "2"])
    assert [sum(held) for held in estimated.parameters(placement)] == real


def test_tensor_parallel_ranks_share_matrices_and_column_biases():
    whole = layer().parameters.dense
    half = layer("--tensor-model-parallel-size", "2", world_size=4).parameters.dense
    # Both norms, and the biases of the two row-parallel layers, are on every rank.
    on_every_rank = 2 * 2 * 48 + 2 * 48
    assert whole - on_every_rank == 2 * (half - on_every_rank)


@pytest.mark.parametrize("model", MODELS)
def test_operations_are_those_of_the_log_line(model):
    """The log line counts half of the attention's products, for a causal mask; unfused attention computes all."""
    args = arguments("--global-batch-size", "8", "--attention-backend", "unfused", *MODELS[model])
    computed = 4 * sum(unit.flops.total for unit in count_model(args).units)
    channels = 2 * args.kv_channels if not args.multi_latent_attention else 8 + 4 + 12
    layers = 8 + (args.mtp_num_layers or 0)
    masked = 8 * args.seq_length * layers * 3 * args.seq_length * channels * args.num_attention_heads
    assert computed - masked == pytest.approx(8 * flops_of_sequence(args), rel=1e-12)


def test_tensor_and_sequence_parallel_activations_are_as_published():
    """Korthikanti et al. 2022: sbh (10 + 24/t), and all of it over t with sequence parallelism; and 4sba / t."""
    s, b, h, a, t = 16, 2, 48, 4, 2
    flags = ("--bf16", "--tensor-model-parallel-size", "2")
    split = layer(*flags, world_size=4).activations.after_f
    assert split == pytest.approx(s * b * h * (10 + 24 / t) + 4 * s * b * a / t)
    sequence = layer(*flags, "--sequence-parallel", world_size=4).activations.after_f
    assert sequence == pytest.approx(s * b * (34 * h + 4 * a) / t)


def test_context_parallel_ranks_share_what_zero_divides(capsys):
    flags = [*SMALL, "--bf16", "--context-parallel-size", "2", "--use-distributed-optimizer"]
    split = job(*flags)
    assert (split.args.data_parallel_size, split.replicas.dense) == (2, 4)
    [parameters, _] = split.parameters(Placement("linear", 2))
    assert estimate(split, "1f1b").state_bytes[0] == parameters.dense * (6 + 12 / 4)
    assert main([*EIGHT, "--schedule", "1f1b", "--", *flags]) == 0
    assert "ZeRO stage 1 over 4 data- and context-parallel ranks leaves 9\n" in capsys.readouterr().out
    assert main([*EIGHT, "--schedule", "1f1b", "--json", "--", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_a_parameter"] == 9


def test_recomputation_keeps_less_and_computes_more():
    unfused = ("--bf16", "--attention-backend", "unfused")
    plain, selective = (layer(*unfused, *more) for more in ((), ("--recompute-activations",)))
    number = 4  # the kind of mask, which megatron-core hands over as a tensor
    assert plain.activations.after_f - selective.activations.after_f == 16 * 2 * 7 * 4 * 16 - number
    assert plain.flops.b < selective.flops.b
    estimated, whole = (job(*SMALL, *unfused, *more, tool=["--world-size", "2"]) for more in (FULLY, ()))
    recomputed, kept = (one.stage_costs(Placement("linear", 2)) for one in (estimated, whole))
    assert not any(kept.time_r)
    assert recomputed.memory_f == kept.memory_f
    # Each of the stage's four layers keeps its input.
    one, layer_input = estimated.count.layers[0].activations.after_f, 16 * 2 * 48 * 2
    assert recomputed.memory_r[0] == 4 * (one - layer_input)


@pytest.mark.parametrize(
    ("method", "layers", "kept_inputs", "recomputed"),
    [("uniform", 1, 4, 4), ("uniform", 2, 2, 4), ("block", 1, 1, 1), ("block", 9, 4, 4)],
)
def test_uniform_and_block_recomputation_keep_the_inputs_that_megatron_core_keeps(
    method, layers, kept_inputs, recomputed
):
    flags = ["--recompute-granularity", "full", "--recompute-method", method, "--recompute-num-layers", str(layers)]
    estimated = job(*SMALL, "--bf16", *flags, tool=["--world-size", "2"])
    costs, one = estimated.stage_costs(Placement("linear", 2)), estimated.count.layers[0].activations.after_f
    assert costs.memory_r[0] == pytest.approx(recomputed * one - kept_inputs * estimated.count.input_bytes)
    assert costs.time_r[0] == pytest.approx(recomputed * estimated.costs.layers[0].time_f)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("--fp16", [16, 4 + 12 / 8, 2 + 14 / 8, 16 / 8]),
        # pretrain_gpt.py accumulates the gradients of bf16 in fp32.
        ("--bf16", [18, 6 + 12 / 8, 2 + 16 / 8, 18 / 8]),
    ],
)
def test_zero_divides_what_each_stage_divides(precision, expected):
    args = arguments(precision)
    assert [States.of(args, stage).bytes_a_parameter(8) for stage in range(4)] == expected


def test_a_snapshot_keeps_adams_part_twice():
    flags = ("--fp16", "--global-batch-size", "8", *POST_VALIDATION)
    assert States.of(arguments(*flags), 1).bytes_a_parameter(8) == 4 + 24 / 8
    assert States.of(arguments(*flags, "--zero-bubble-rollback", "inverse"), 1).bytes_a_parameter(8) == 4 + 12 / 8
    assert States.of(arguments(*flags, "--zero-bubble-rollback-on-host"), 1).bytes_a_parameter(8) == 4 + 12 / 8


def test_sgd_has_one_moment_or_none():
    flags = ("--fp16", "--global-batch-size", "8", "--optimizer", "sgd")
    assert States.of(arguments(*flags), 0).bytes_a_parameter(8) == 4 + 4 + 4
    assert States.of(arguments(*flags, "--sgd-momentum", "0"), 0).bytes_a_parameter(8) == 4 + 4
    assert States.of(arguments(*flags, *POST_VALIDATION), 0).bytes_a_parameter(8) == 4 + 2 * 8


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 2 + 4 + 12),
        (["--grad-reduce-in-bf16"], 2 + 2 + 12),
        (["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"], 2 + 4 + 2 + 2 + 2),
        (["--main-params-dtype", "fp16", "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp16"], 2 + 4 + 2 + 1 + 2),
        (["--no-store-param-remainders"], 2 + 4 + 12),
    ],
)
def test_gradients_and_the_precision_aware_optimizer_are_counted_as_the_flags_say(flags, expected):
    if flags and flags != ["--grad-reduce-in-bf16"]:
        flags = ["--use-precision-aware-optimizer", "--use-distributed-optimizer", *flags]
    assert States.of(arguments("--bf16", *flags), 0).bytes_a_parameter(8) == expected
