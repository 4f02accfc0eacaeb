"""A refusal names flags that were given, and no other ones, before it says why and what would work."""

from __future__ import annotations

import random
import re

import pytest

from tests.checked_flags import checked

FLAGS = """
--use-torch-fsdp2 --untie-embeddings-and-output-weights --zero-bubble-recompute --zero-bubble-recompute=planned
--recompute-granularity=full --recompute-granularity=selective --use-distributed-optimizer --fp16 --bf16 --zero-bubble
--num-experts=2 --mtp-num-layers=1 --zero-bubble-post-validation --zero-bubble-vocabulary-parallel=on
--zero-bubble-vocabulary-parallel=auto --zero-bubble-offload=auto --zero-bubble-memory-limit=1.5
--zero-bubble-seed-by-layer --zero-bubble-keep-layout --zero-bubble-placement=v --zero-bubble-schedule=zb-v
--zero-bubble-schedule=zb-h1 --zero-bubble-schedule=auto --zero-bubble-microbatch-order=planned
--variable-seq-lengths --hierarchical-sgd=2:2 --num-virtual-stages-per-pipeline-rank=2 --calculate-per-token-loss
--pipeline-model-parallel-size=2 --tensor-model-parallel-size=2 --overlap-grad-reduce --overlap-param-gather
"""


def refusal(flags: list[str]) -> str | None:
    """The line that refuses these flags of the trainer; None if nothing does."""
    try:
        checked({name: value or None for name, _, value in (flag.partition("=") for flag in flags)})
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("recompute", [["--zero-bubble-recompute"], ["--zero-bubble-recompute=planned"], []])
def test_recomputation_is_refused_with_fsdp_only_where_it_is_asked_for(recompute: list[str]):
    refused = refusal(["--use-torch-fsdp2", "--untie-embeddings-and-output-weights", "--zero-bubble", *recompute])
    reason = "R would use parameters that are not gathered: use --recompute-granularity selective"
    planned = f"--zero-bubble-recompute planned does not work with --use-torch-fsdp2: {reason}"
    assert refused == (planned if recompute else None)


def test_refusals_of_drawn_flags_name_flags_that_were_given():
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        flags = rng.sample(FLAGS.split(), rng.randint(2, 4))
        message = refusal(flags) or ""
        if " does not work with " in message:
            refused += 1
            named = set(re.findall(r"--[a-z0-9-]+", message.partition(": ")[0]))
            assert named <= {flag.partition("=")[0] for flag in flags}, f"{flags}: {message}"
    assert refused >= 5
