"""A benchmark trains under megatron-core's 1F1B, the schedules that its flags name, and those of others."""

from __future__ import annotations

import pytest
from tiny_benchmark import SIZE, TINY, arguments

from benchmarks import train
from benchmarks.train import peers
from megatron.zero_bubble.cli.benchmark.arguments import BenchmarkFlags
from megatron.zero_bubble.cli.benchmark.contestants import BASELINE, CHUNKS_FLAG, gather
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.cli.trainings import complete_arguments
from megatron.zero_bubble.schedule import Placement


def test_the_field_has_the_baseline_first_and_every_peer():
    given = arguments("--schedule", "zb-h1", "--schedule", "auto --zero-bubble-memory-limit 2")
    field = gather(given, False, tuple(peers(given)))
    assert [one.name for one in field.contestants] == [
        *(BASELINE, "zb-h1", "auto --zero-bubble-memory-limit 2", "megatron-core interleaved"),
        *("torch GPipe", "torch 1F1B", "torch Interleaved1F1B", "torch InterleavedZeroBubble"),
        *("torch ZBVZeroBubble", "torch DualPipeV"),
    ]
    flags = " ".join(field.flags)
    assert "--pipeline-model-parallel-size 2" in flags
    assert "--global-batch-size 4" in flags
    assert field.args.global_batch_size == 4
    assert field.contestants[2].words == ("--zero-bubble-schedule", "auto", "--zero-bubble-memory-limit", "2")


def test_the_field_of_what_zero_bubble_alone_chooses():
    given = arguments("--schedule", "chosen", "--schedule", "chosen --zero-bubble-placement v", "--num-chunks", "2")
    _, alone, v = gather(given, False).contestants
    assert (alone.name, alone.words) == ("chosen", ("--zero-bubble",))
    assert (v.name, v.words) == ("chosen --zero-bubble-placement v", ("--zero-bubble", "--zero-bubble-placement", "v"))


def test_the_baseline_alone_gets_its_flags():
    given = arguments("--schedule", "zb-h1", "--baseline-flags", "--recompute-activations --init-method-std 0.01")
    baseline, ours = gather(given, False).contestants
    assert baseline.words == ("--recompute-activations", "--init-method-std", "0.01")
    assert "--recompute-activations" not in ours.words


def test_zero_bubble_flags_after_the_dashes_reach_no_baseline_and_a_quote_replaces_them():
    words = ["--zero-bubble-memory-limit=2", "--enable-optimizer-post-validation", "--lr", "1e-3"]
    quotes = ["--schedule", "auto --zero-bubble-memory-limit 1.5 --lr 1e-2", "--schedule", "chosen"]
    given = read_flags(BenchmarkFlags, [*SIZE, *quotes, "--", *TINY, *words], "", "").of_named_schedules()
    field = gather(given, False, (*peers(given, with_torch=False),))
    baseline, auto, chosen, interleaved = field.contestants
    assert (baseline.words, interleaved.words) == ((), (CHUNKS_FLAG, "2"))
    assert {"--zero-bubble-memory-limit=2", "--enable-optimizer-post-validation"}.isdisjoint(field.flags)
    assert chosen.words == ("--zero-bubble", *words[:2])
    trained = complete_arguments([*field.flags, *auto.words], 2, "", has_cuda=False)
    assert (trained.zero_bubble_memory_limit, trained.lr) == ("1.5", 1e-2)
    assert trained.zero_bubble_post_validation


@pytest.mark.parametrize("chunks", [f"{CHUNKS_FLAG} 3", f"{CHUNKS_FLAG}=3"])
def test_a_schedules_own_number_of_chunks_is_kept(chunks):
    model = ["--num-layers", "6", *TINY[2:]]
    given = read_flags(BenchmarkFlags, [*SIZE, "--schedule", f"interleaved-zb {chunks}", "--", *model], "", "")
    _, ours = gather(given, False, ()).contestants
    assert ours.words == ("--zero-bubble-schedule", "interleaved-zb", *chunks.split())
    assert ours.placement == Placement("interleaved", 2, 3)


@pytest.mark.parametrize(
    ("flags", "has_megatrons", "has_torchs"),
    [((), False, False), (("--peers",), True, True), (("--peers", "megatron-core"), True, False)],
)
def test_peers_of_torch_can_be_left_out(monkeypatch, flags, has_megatrons, has_torchs):
    names = []
    monkeypatch.setattr(train, "benchmark", lambda _, peers: names.extend(one.name for one in peers))
    assert train.main([*SIZE, *flags, "--", *TINY]) == 0
    assert ("megatron-core interleaved" in names) == has_megatrons
    assert ("torch GPipe" in names) == has_torchs
