"""Predict memory and throughput of a training under each schedule, without a GPU.

    zero-bubble estimate --world-size 8 --device-memory 80GiB --device-tflops 312 --mfu 0.45 \\
        --interconnect-bandwidth 25 -- --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 \\
        --vocab-size 50257 --bf16 --pipeline-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 32
    zero-bubble estimate --world-size 8 --profile profile.json -- <the flags of the run that was profiled>

After `--` come the flags of pretrain_gpt.py for the job; flags that change neither memory nor time may be left out.
Flags have Megatron-LM's defaults; without --transformer-impl local, layers are therefore Transformer Engine's.

The table shows memory and speed of each schedule. Times are measured (--profile), or computed: the number of operations
is divided by the layers' speed, which is --device-tflops times --mfu. Memory is shown for the rank that needs the most
memory. The memory of a rank is the sum of its model states (parameters, gradients and the optimizer's states,
sharded as --zero-stage says), its activations at the peak of the simulated schedule, and --reserved-memory. If no
schedule fits, lines below the table show whether a schedule fits with recomputation. If the training's flags leave the
layout of the layers to --zero-bubble, a second table shows the layout that the training would choose, and the flags
that fix this layout.

docs/estimate.md describes the estimate in detail. `zero-bubble estimate stragglers --help` is about slow replicas.

A mistake in the flags ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import warnings

from megatron.zero_bubble.cli.estimate.arguments import EstimateFlags
from megatron.zero_bubble.cli.invocation import read_flags, run_command


def main(argv: list[str]) -> int:
    return run_command("zero-bubble estimate", lambda: _run(argv))


def _run(argv: list[str]) -> None:
    if argv[:1] == ["stragglers"]:
        from megatron.zero_bubble.cli.estimate.stragglers import estimate_stragglers

        estimate_stragglers(argv[1:])
        return
    flags = read_flags(EstimateFlags, argv, "zero-bubble estimate", __doc__ or "")
    # megatron-core and torch print warnings about features that an estimate does not use.
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)
    # Imported here, so that --help does not need torch.
    from megatron.zero_bubble.cli.estimate.estimate_tables import as_json, as_text
    from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
    from megatron.zero_bubble.cli.estimate.results import results_of

    results = results_of(EstimatedJob.of(flags), flags.schedule)
    flags.deliver(as_json(results), as_text(results, per_rank=flags.per_rank, markdown=flags.markdown))
