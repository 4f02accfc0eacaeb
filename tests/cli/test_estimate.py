"""The estimate: parameters of real models, operations as --log-throughput counts them, memory as published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.cli.estimate.arguments import EstimateFlags
from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import estimate
from megatron.zero_bubble.cli.estimate_command import main
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.cli.trainings import complete_arguments, one_process, rank_model
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import Placement, ScheduleError, StageCosts, simulate
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json
from megatron.zero_bubble.session.model_states import States
from megatron.zero_bubble.trainer.model_count import UnitCount, count_model, flops_of_sequence
from tests.mistakes import one_line_mistake

ROOT = Path(__file__).parents[2]

SMALL = ["--num-layers", "8", "--hidden-size", "48", "--num-attention-heads", "4", "--seq-length", "16"]
SMALL += ["--micro-batch-size", "2", "--vocab-size", "300", "--pipeline-model-parallel-size", "2"]
LLAMA = ["--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"]
LLAMA += ["--group-query-attention", "--num-query-groups", "2", "--untie-embeddings-and-output-weights"]
OFFLOADED = ["--zero-bubble-schedule", "auto", "--zero-bubble-memory-limit", "0.5", "--zero-bubble-offload", "auto"]
OFFLOADED += ["--transformer-impl", "local", "--pipeline-model-parallel-size", "4"]
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
FULLY = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
UNTIED = "--untie-embeddings-and-output-weights"
LARGE = [*SMALL, "--hidden-size", "4096", "--pipeline-model-parallel-size", "4", "--global-batch-size", "16"]
POST_VALIDATION = ["--zero-bubble", "--zero-bubble-post-validation"]
TOOL, FOUR = ["--world-size", "8"], ["--world-size", "4"]
PAPER = json.loads((ROOT / "tests" / "cli" / "paper_memory.json").read_text())
"""Peak memory in GB that Qi et al. 2024 report on A100 with 80 GB."""


def arguments(*flags: str, world_size: int = 2, base: list[str] = SMALL):
    required = ["--train-iters", "1", "--lr", "1e-4", "--mock-data"]
    return complete_arguments([*base, *required, *flags], world_size, "test", has_cuda=True)


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
    assert main([*TOOL, "--schedule", "1f1b", "--", *flags]) == 0
    assert "ZeRO stage 1 over 4 data- and context-parallel ranks leaves 9\n" in capsys.readouterr().out
    assert main([*TOOL, "--schedule", "1f1b", "--json", "--", *flags]) == 0
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
    aware = [] if "--grad-reduce-in-bf16" in flags or not flags else ["--use-precision-aware-optimizer"]
    assert States.of(arguments("--bf16", *aware, *flags), 0).bytes_a_parameter(8) == expected


def job(*flags: str, tool: list[str] = TOOL) -> EstimatedJob:
    return EstimatedJob.of(read_flags(EstimateFlags, [*tool, "--", *flags], "estimate", ""))


def paper_job(name: str) -> EstimatedJob:
    """The job that examples/estimate_paper.sh estimates."""
    size = PAPER[name]["model"]
    p, batch = size["pipeline"], size["micro_batch"]
    flags = ["--num-layers", size["layers"], "--hidden-size", size["hidden"], "--num-attention-heads", size["heads"]]
    flags += ["--pipeline-model-parallel-size", p, "--micro-batch-size", batch, "--global-batch-size", 3 * p * batch]
    flags += ["--num-virtual-stages-per-pipeline-rank", size["chunks"], "--fp16"]
    flags += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    flags += ["--seq-length", 1024, "--vocab-size", 50257, "--untie-embeddings-and-output-weights"]
    flags += ["--transformer-impl", "transformer_engine", "--attention-backend", "unfused"]
    tool = ["--world-size", str(p), "--reserved-memory", "1B"]
    return job(*map(str, flags), tool=tool)


@pytest.mark.parametrize("name", PAPER)
def test_memory_is_within_6_percent_of_the_papers(name):
    measured = PAPER[name]["peak_memory_GB"]
    found = {schedule: max(estimate(paper_job(name), schedule).total_bytes) / 1e9 for schedule in measured}
    assert found == pytest.approx(measured, rel=0.06)


def test_what_does_not_fit_is_said_so_and_auto_takes_what_is_left(capsys):
    flags = [*SMALL, "--num-layers", "4", "--global-batch-size", "32"]
    whole = estimate(job(*flags, tool=["--world-size", "2"]), "zb-2p")
    room = str(int(max(whole.total_bytes) - 1))
    assert main(["--world-size", "2", "--device-memory", f"{room}B", "--json", "--", *flags]) == 0
    by_name = {one["schedule"]: one for one in json.loads(capsys.readouterr().out)["schedules"]}
    assert whole.fits
    assert not by_name["zb-2p"]["fits"]
    assert by_name["1f1b"]["fits"]
    assert by_name["auto"]["fits"]
    assert by_name["1f1b"]["ratio_to_1f1b"] == 1
    assert {"interleaved-zb", "zb-v", "v-min"} <= set(by_name)


def test_the_reduction_of_gradients_takes_time_unless_it_overlaps():
    plain, *overlapping = (
        estimate(job(*LARGE, UNTIED, *more), "zb-h1") for more in ((), ["--overlap-grad-reduce"], ["--use-torch-fsdp2"])
    )
    assert plain.iteration_ms > plain.timeline.makespan
    for each in overlapping:
        assert each.iteration_ms == each.timeline.makespan


def test_post_validation_pays_for_spans_instead_of_the_makespan():
    waiting, going_on = (estimate(job(*LARGE, UNTIED, *more, tool=FOUR), "zb-h2") for more in ((), POST_VALIDATION))
    assert waiting.iteration_ms == waiting.timeline.makespan
    assert going_on.iteration_ms == pytest.approx(going_on.timeline.cost, rel=1e-3)
    assert going_on.iteration_ms < 0.95 * waiting.iteration_ms


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "the first stage waits for the last, because the gradients of the embedding"),
        pytest.param(
            [UNTIED, "--calculate-per-token-loss"],
            "the first stage waits for the last, because --calculate-per-token-loss",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_post_validation_gains_where_the_first_stage_need_not_wait_for_the_last(flags, reason, capsys):
    bound = job(*LARGE, *POST_VALIDATION, *flags, tool=FOUR)
    waiting, in_a_v = estimate(bound, "zb-h2"), estimate(bound, "zb-v")
    assert waiting.iteration_ms == waiting.timeline.makespan
    assert in_a_v.iteration_ms < in_a_v.timeline.makespan
    command = [*FOUR, "--schedule", "zb-h2", "--schedule", "zb-v", "--", *LARGE, *POST_VALIDATION]
    assert main([*command, *flags]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "gains nothing" in line]
    assert line.startswith(f"--zero-bubble-post-validation gains nothing, except in a V: {reason}")
    assert main([*command, UNTIED]) == 0
    assert "gains nothing" not in capsys.readouterr().out


def test_a_profile_replaces_operations(tmp_path):
    args = arguments()
    from megatron.zero_bubble.session.job_flags import JobFlags

    file = tmp_path / "profile.json"
    costs = StageCosts.uniform(2, 10, 11, 9, 1, 2**30, -(2**29), -(2**29))
    file.write_text(profile_to_json(Profile(Placement("linear", 2), costs, 0.0, JobFlags.of(args).model)))
    found = job(*SMALL, "--global-batch-size", "8", tool=["--world-size", "2", "--profile", str(file)])
    assert estimate(found, "1f1b").timeline.costs == costs
    assert estimate(found, "zb-v").timeline.costs.time_f == (5,) * 4
    assert max(estimate(found, "1f1b").activation_bytes) == 2 * 2**30


def test_the_table_names_every_schedule_and_the_refused_ones(capsys):
    flags = [*SMALL, "--num-layers", "6", "--global-batch-size", "8"]
    assert main(["--world-size", "2", "--per-rank", "--", *flags]) == 0
    output = capsys.readouterr().out
    [refused] = [line for line in output.splitlines() if "--num-layers 6 is not a multiple of the 4 stages" in line]
    assert {"zb-v", "v-half", "v-min"} <= set(refused.split(": --num-layers")[0].split(", "))
    assert "zb-h1, rank 1" in output
    assert "bytes a parameter: 4 + 4 for its gradient + 8 for Adam" in output
    totals = job(*flags, tool=["--world-size", "2"]).flops(Placement("linear", 2))
    assert f"1 : {totals.b / totals.f:.3f} : {totals.w / totals.f:.3f}" in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--world-size", "2", "--", *SMALL, "--num-laers", "2"], "--num-laers"),
        (["--world-size", "2", "--", *SMALL, "--num-attention-heads", "5"], "--hidden-size 48"),
        (["--world-size", "2", "--device-memory", "80", "--", *SMALL], "expected bytes such as 80GiB"),
        (["--world-size", "2", "--mfu", "1.5", "--", *SMALL], "--mfu: must not be above 1"),
        (
            ["--world-size", "3", "--", *SMALL],
            "do not divide the 3 ranks of the job: --world-size must give a multiple of",
        ),
        (["--world-size", "2", "--profile", "nowhere.json", "--", *SMALL], "nowhere.json"),
        (["--world-size", "2", "--schedule", "zb-h9", "--", *SMALL], "zb-h9"),
        (["--world-size", "2", "--zero-stage", "4", "--", *SMALL], "--zero-stage"),
        (["--world-size", "2", "--", *SMALL, "--pipeline-model-parallel-size", "1"], "at least 2"),
        (["--world-size", "2", "--", *SMALL, "--moe-layer-freq", "[1"], "--moe-layer-freq: expected a number"),
        (
            ["--world-size", "2", "--", *SMALL, "--no-rope-freq", "3"],
            "megatron-core refuses this model: no_rope_freq=3",
        ),
        (["--", *SMALL], "--world-size"),
        (["--world-size", "2", "--host-bandwidth", "25", "--", *SMALL], "needs --zero-bubble-offload auto"),
        (
            ["--world-size", "4", "--", *SMALL, "--global-batch-size", "16", *OFFLOADED],
            "--zero-bubble-offload auto needs --host-bandwidth",
        ),
    ],
)
def test_a_mistake_is_one_line(flags, words, capsys):
    line = one_line_mistake(main, flags, capsys)
    assert line.startswith("zero-bubble estimate: error: ")
    assert words in line


def test_full_recomputation_is_an_operation_and_1f1b_of_megatron_core_recomputes_in_its_backward(capsys):
    plain = (*LARGE, "--bf16", "--overlap-grad-reduce")
    flags = (*plain, *FULLY)
    costs, kept = (job(*given).stage_costs(Placement("linear", 4)) for given in (flags, plain))
    assert (costs.time_b, costs.memory_f) == (kept.time_b, kept.memory_f), "B and F are what they are without R"
    assert costs.time_r[0] == pytest.approx(costs.time_f[0])
    assert main([*TOOL, "--schedule", "1f1b", "--schedule", "zb-h1", "--json", "--", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["flops_of_a_microbatch"]["r"] > 0
    inside = simulate(generate("1f1b", 4, job(*flags).flags.most_microbatches), costs.recomputing_in_backward())
    for one in document["schedules"]:
        assert one["ratio_to_1f1b"] == pytest.approx(inside.makespan / one["makespan_ms"])
        assert one["idle"] == pytest.approx(one["imbalance"] + one["bubble_rate"])
        assert one["imbalance"] > 0, "the last stage has the logits"
    assert document["schedules"][0]["ratio_to_1f1b"] > 1
    assert "to 1F1B: to megatron-core's own" in "".join(document["notes"])


def test_planned_recomputation_keeps_everything_unless_the_limit_leaves_no_room():
    planned = (*LARGE, "--bf16", "--zero-bubble", "--zero-bubble-recompute", "planned", "--zero-bubble-memory-limit")
    roomy, tight = (estimate(job(*planned, limit), "auto") for limit in ("1", "0.6"))
    assert (roomy.timeline.schedule.recomputes, tight.timeline.schedule.recomputes) == (False, True)
    assert max(tight.activation_bytes) <= 0.6 * max(roomy.activation_bytes) * (1 + 1e-9)
    with pytest.raises(ScheduleError, match="does not plan recomputation"):
        estimate(job(*planned, "1"), "gpipe")


def test_the_table_says_what_is_offloaded_and_how_much_host_memory_that_takes(capsys):
    flags = ["--world-size", "4", "--schedule", "auto", "--schedule", "1f1b"]
    training = [*SMALL, "--global-batch-size", "16", *OFFLOADED]
    fast, slow = (["--host-bandwidth", speed, "--", *training] for speed in ("100000", "1e-6"))
    assert main([*flags, *fast]) == 0
    heads, auto, baseline = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert heads.endswith("offloaded  host (GiB)")
    assert (auto.split()[0], baseline.split()[-2]) == ("auto", "0.00%")
    by_link = []
    for link in (fast, slow):
        assert main([*flags, "--json", *link]) == 0
        by_link.append(json.loads(capsys.readouterr().out)["schedules"][0])
    one, other = by_link
    assert one["schedule"] == other["schedule"] == "auto"
    assert one["offloaded"] > 0 == other["offloaded"]
    assert max(one["host_bytes"]) > 0 == max(other["host_bytes"])
    assert one["iteration_ms"] < other["iteration_ms"]


BF16 = "--bf16 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
BF16 += "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 1 "
BF16 += "--micro-batch-size 1 --use-distributed-optimizer --pipeline-model-parallel-size 8 --sequence-parallel"
DEEPSEEK_V3 = """
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --seq-length 4096
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
--v-head-dim 128 --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --vocab-size 129279
--num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8 --moe-router-pre-softmax --moe-grouped-gemm
--moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-permute-fusion
--moe-token-dispatcher-type alltoall --mtp-num-layers 1 --tensor-model-parallel-size 2 --expert-model-parallel-size 64
--global-batch-size 15360 --allow-padding-num-layers
"""
LLAMA_3_1_405B = """
--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --group-query-attention
--num-query-groups 8 --seq-length 8192 --rotary-base 500000 --use-rope-scaling --vocab-size 128255
--tensor-model-parallel-size 8 --context-parallel-size 2 --num-virtual-stages-per-pipeline-rank 8
--global-batch-size 1536 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
"""
QWEN3_235B = """
--num-layers 94 --hidden-size 4096 --num-attention-heads 64 --group-query-attention --num-query-groups 4
--kv-channels 128 --qk-layernorm --seq-length 4096 --rotary-base 1000000 --vocab-size 151935 --num-experts 128
--moe-ffn-hidden-size 1536 --moe-router-topk 8 --moe-grouped-gemm --tensor-model-parallel-size 2
--expert-model-parallel-size 32 --global-batch-size 2048 --account-for-embedding-in-pipeline-split
--account-for-loss-in-pipeline-split
"""


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [(DEEPSEEK_V3, 671.03, 37.6), (LLAMA_3_1_405B, 405.85, 405.9), (QWEN3_235B, 235.09, 22.2)],
    ids=["DeepSeek-V3", "Llama 3.1 405B", "Qwen3-235B"],
)
def test_published_models_have_their_parameters_and_operations(model, billions, active):
    """Of a token F computes two operations with each active parameter but the embedding's, and attention's own."""
    estimated = job(*model.split(), *BF16.split(), tool=["--world-size", "1024"])
    assert sum(unit.whole for unit in estimated.count.units) / 1e9 == pytest.approx(billions, rel=1e-4)
    args = estimated.args
    embedding = args.padded_vocab_size * args.hidden_size / 1e9
    channels = 320 / 2 if args.multi_latent_attention else args.kv_channels
    attended = 2 * args.seq_length / 2 * channels * args.num_attention_heads / 1e9
    layers = args.num_layers + (args.mtp_num_layers or 0)
    further = 0 if args.mtp_num_layers is None else further_parameters(args) / 1e9
    computed = estimated.flops_of_sequence / args.seq_length / 6 / 1e9
    assert computed == pytest.approx(active - embedding + layers * attended + further, rel=0.01)


def further_parameters(args) -> float:
    """Parameters that a token passes in the prediction layer: those of an expert layer, the joining, and the logits."""
    one = count_model(replace(args, tensor_model_parallel_size=1, sequence_parallel=False)).layers[-1]
    held = 256 // args.expert_model_parallel_size
    joining = 2 * args.hidden_size**2
    return one.parameters.dense + one.parameters.expert / held * 8 + joining + args.padded_vocab_size * args.hidden_size


def test_the_defaults_are_megatron_lms():
    """A recipe without --transformer-impl means Transformer Engine, whose attention and gated MLP are fused."""
    model = [*LLAMA_3_1_405B.split(), *BF16.split()]
    plain, engine, local = (
        max(estimate(job(*model, *more, tool=["--world-size", "1024"]), "1f1b").activation_bytes)
        for more in ((), ("--transformer-impl", "transformer_engine"), ("--transformer-impl", "local"))
    )
    assert plain == engine
    # sb/(tc) (18 h + 4 kv + 6 f) and a logarithm of each head's sums: 16 layers, of 8 microbatches
    h, f, tokens = 16384, 53248, 8192 / 2
    assert engine == pytest.approx(16 * 8 * tokens / 8 * (10 * h + 2 * 2 * 1024 + 6 * f + 4 * 128), rel=0.07)
    assert local > 1.3 * engine


def test_layers_that_the_ranks_do_not_divide_are_said_once_and_compared_with_what_megatron_needs(capsys):
    odd = [*LARGE, "--num-layers", "6", "--global-batch-size", "8", "--zero-bubble"]
    assert main([*FOUR, "--schedule", "1f1b", "--schedule", "zb-h1", "--schedule", "auto", "--", *odd]) == 0
    output = capsys.readouterr().out
    assert output.count("--num-layers 6 is not a multiple of") == 1
    given = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    assert f"schedules on Megatron's split are estimated with {given}, with which Megatron runs it" in output
    assert "\n1f1b " in output
    assert main([*FOUR, "--json", "--schedule", "1f1b", "--", *odd]) == 0
    [found] = json.loads(capsys.readouterr().out)["schedules"]
    even = [*odd, "--zero-bubble-keep-layout", *given.split()]
    assert main([*FOUR, "--json", "--schedule", "1f1b", "--", *even]) == 0
    [expected] = json.loads(capsys.readouterr().out)["schedules"]
    assert found == expected
