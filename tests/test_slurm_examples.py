"""The flags that the Slurm examples give to pretrain_gpt.py: of the paper's models, under every schedule."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.train import PeerFlags
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.layers import layers_of_layout
from megatron.zero_bubble.trainer.arguments import Arguments, parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check
from tests.launch import ROOT

EXAMPLES = ROOT / "examples" / "slurm"
PAPER = {
    "1.5B": {"num_layers": 22, "num_attention_heads": 24, "hidden_size": 2304, "pipeline": 8, "micro_batch_size": 6},
    "6.2B": {"num_layers": 30, "num_attention_heads": 32, "hidden_size": 4096, "pipeline": 8, "micro_batch_size": 3},
    "14.6B": {"num_layers": 46, "num_attention_heads": 40, "hidden_size": 5120, "pipeline": 16, "micro_batch_size": 1},
    "28.3B": {"num_layers": 62, "num_attention_heads": 48, "hidden_size": 6144, "pipeline": 32, "micro_batch_size": 1},
}
"""Zero Bubble Pipeline Parallelism (ICLR 2024), Table 3."""
CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""Chunks a rank of each model's interleaved schedules."""
MODELS = [name.lower() for name in PAPER]
ONE_CHUNK = ["megatron-core", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "auto"]
SEVERAL_CHUNKS = ["megatron-core-interleaved", "interleaved-1f1b", "interleaved-zb"]


def variables(script: str, environment: Mapping[str, str]) -> dict[str, list[str]]:
    """The flags and sizes that `training.sh` makes of MODEL and SCHEDULE."""
    arrays = ("GPT_MODEL_ARGS", "TRAINING_ARGS", "MODEL_PARALLEL_ARGS", "SCHEDULE_ARGS", "DATA_ARGS")
    code = f'source {script}\nprintf \'%s\\n\' "$PIPELINE_SIZE" "$MICRO_BATCH_SIZE" "$NUM_MICROBATCHES" "$CHUNKS"\n'
    code += "\n".join(f"printf '%s\\n' \"${{{array}[@]}}\"" for array in arrays)
    result = subprocess.run(
        ["bash", "-euc", code], cwd=ROOT, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    words = [word for word in result.stdout.split("\n") if word]
    return {"sizes": words[:4], "flags": words[4:]}


def training(model: str, schedule: str, *more: str) -> Arguments:
    """The complete and checked flags, as the first rank sees them."""
    found = variables("examples/slurm/training.sh", {"MODEL": model, "SCHEDULE": schedule})
    pipeline, micro_batch, microbatches, _ = map(int, found["sizes"])
    batch = ("--global-batch-size", str(micro_batch * microbatches), "--train-iters", "1000")
    parsed = parse_arguments([*found["flags"], *batch, *more])
    return complete_and_check(parsed, {"WORLD_SIZE": str(pipeline)}, has_cuda=True)


@pytest.mark.parametrize("model", PAPER)
def test_the_models_are_the_papers(model):
    paper, args = PAPER[model], training(model.lower(), "zb-2p")[0]
    assert args.pipeline_model_parallel_size == paper["pipeline"]
    assert args.global_batch_size // args.micro_batch_size == 4 * paper["pipeline"]
    for name in ("num_layers", "num_attention_heads", "hidden_size", "micro_batch_size"):
        assert getattr(args, name) == paper[name], name
    per_layer = 12 * args.hidden_size**2
    billions = (args.num_layers * per_layer + args.hidden_size * (args.vocab_size + args.seq_length)) / 1e9
    assert billions == pytest.approx(float(model.rstrip("B")), rel=0.03)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", [*ONE_CHUNK, *SEVERAL_CHUNKS])
def test_every_schedule_is_accepted_and_embedding_and_loss_take_a_layers_place(model, schedule):
    args, job = training(model, schedule)
    layers = layers_of_layout(args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size)
    chunks = CHUNKS[model.upper()] if schedule in SEVERAL_CHUNKS else 1
    assert len(layers) == args.pipeline_model_parallel_size * chunks
    assert layers[0] == layers[-1] == layers[1] - 1
    assert set(layers[1:-1]) == {layers[1]}
    assert job.flags.schedule == (None if schedule.startswith("megatron-core") else schedule)


@pytest.mark.parametrize(("model", "more"), [("6.2b", ()), ("1.5b", ("--allow-padding-num-layers",))])
def test_a_v_takes_the_papers_models(model, more):
    args, job = training(model, "zb-v", *more)
    assert job.placement.kind == "v"
    assert layers_of_layout(args.pipeline_model_parallel_layout, 8) == job.partition
    assert (len(job.partition), sum(job.partition)) == (16, args.num_layers)


@pytest.mark.parametrize("model", MODELS)
def test_a_variant_asks_for_the_nodes_that_its_model_takes(model):
    script = (EXAMPLES / f"pretrain_gpt_{model}.sbatch").read_text()
    nodes, gpus = (int(re.search(rf"--{name}=(\d+)", script)[1]) for name in ("nodes", "gpus-per-node"))
    assert nodes * gpus == PAPER[model.upper()]["pipeline"]
    assert f"\nMODEL={model}\n" in script
    common = [line for line in script.splitlines() if line.startswith("#SBATCH --time")]
    assert common[0] in (EXAMPLES / "pretrain_gpt.sbatch").read_text()


def test_real_data_takes_a_prefix_and_the_tokenizer_that_made_it():
    environment = {"MODEL": "1.5b", "SCHEDULE": "auto", "DATA_PATH": "corpus", "TOKENIZER_MODEL": "tokenizer.json"}
    flags = variables("examples/slurm/training.sh", environment)["flags"]
    assert "--mock-data" not in flags
    assert flags[flags.index("--data-path") + 1] == "corpus"
    assert flags[flags.index("--tokenizer-model") + 1] == "tokenizer.json"


@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.s*")), ids=lambda path: Path(path).name)
def test_bash_reads_the_scripts(script):
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_transformer_engine_is_taken_where_it_is_installed(tmp_path):
    def implementation(environment: Mapping[str, str]) -> str:
        found = variables("examples/slurm/training.sh", {"MODEL": "1.5b", "SCHEDULE": "zb-2p", **environment})["flags"]
        return found[found.index("--transformer-impl") + 1]

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit $HAS_NONE\n")
    python.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert implementation({**path, "HAS_NONE": "0"}) == "transformer_engine"
    assert implementation({**path, "HAS_NONE": "1"}) == "local"
    assert implementation({**path, "HAS_NONE": "0", "TRANSFORMER_IMPL": "local"}) == "local"


def test_the_examples_set_what_keeps_a_step_free_of_waits_for_the_device(tmp_path):
    code = 'source examples/slurm/environment.sh; echo "$CUDA_MODULE_LOADING $PYTORCH_CUDA_ALLOC_CONF"'
    environment = {"PATH": "/usr/bin:/bin", "SLURM_NNODES": "1", "LOGS": str(tmp_path)}
    for given, expected in (({}, "EAGER expandable_segments:True"), ({"CUDA_MODULE_LOADING": "LAZY"}, "LAZY expand")):
        command = ["bash", "-euc", code]
        result = subprocess.run(command, cwd=ROOT, env={**environment, **given}, capture_output=True, text=True)
        assert result.stdout.startswith(expected), result.stderr


def test_the_comparison_gives_the_benchmark_flags_that_it_has():
    before, command = (EXAMPLES / "compare.sbatch").read_text().split("python -m benchmarks.train")
    flags = re.findall(r"--[a-z-]+\b", command.split(" -- ")[0] + before.split("CHOSEN=()")[1])
    assert "--schedule" in flags
    assert {*flags} <= {flag_name(field.name) for field in fields(PeerFlags)}
