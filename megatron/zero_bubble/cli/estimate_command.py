"""Predict memory and throughput of a training under each schedule, without a GPU.

    zero-bubble estimate --world-size 8 --device-memory 80GiB --device-tflops 312 --mfu 0.45 \\
        --interconnect-bandwidth 25 -- --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 \\
        --vocab-size 50257 --bf16 --pipeline-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 32
    zero-bubble estimate --world-size 8 --profile profile.json -- <the flags of the run that was profiled>

After `--` come pretrain_gpt.py's flags, as the job will have them; flags that change neither memory nor time may be
left out. Times are numbers of operations divided by the speed that layers reach (--device-tflops times --mfu), or
measured times (--profile). Memory is the sum of parameters, gradients and the optimizer's states, sharded as
--zero-stage says, of the activations at the peak of the simulated schedule, and of --reserved-memory. The table shows
the rank that needs most; a schedule fits if that rank does, and where none does, lines below the table say what
recomputation would bring. Where the training's flags leave the layout of its layers to --zero-bubble, a second table
shows the one that it would choose, and the flags that fix it. `auto` is planned under --zero-bubble-memory-limit, and a
line below the table shows that limit in GiB.

Parameters, operations and activations are counted on the model itself, which megatron-core builds on torch's meta
device: dense layers, experts in any layers, multi-latent attention, prediction layers. Defaults are Megatron-LM's:
layers are Transformer Engine's unless the flags say --transformer-impl local. Attention and routed experts are counted
as the kernels of a GPU compute and keep them; `make gpu-check` compares local ones with an allocator. An iteration
takes the makespan and the reduction of gradients; with --zero-bubble-post-validation iterations overlap where the
schedule allows it. The optimizer's own time is not counted, and tensor- and expert-parallel communication only as far
as --mfu or the profile contains it.

With --host-bandwidth, and --zero-bubble-offload auto among the training's flags, planned schedules may copy activations
to the host; the table shows the part of the microbatches' activations that leaves, and the memory that it takes on the
host of the rank where that is most.

`zero-bubble estimate stragglers --help` is about what a slow replica costs.

A mistake ends with one line and exit status 2.
"""

from __future__ import annotations

import warnings

from megatron.zero_bubble.cli.estimate.arguments import EstimateFlags
from megatron.zero_bubble.cli.invocation import read_flags, run_command


def main(argv: list[str]) -> int:
    return run_command("zero-bubble estimate", lambda: _run(argv))


def _run(argv: list[str]) -> None:
    if argv[:1] == ["stragglers"]:
        from megatron.zero_bubble.cli.estimate.straggler_estimate import estimate_stragglers

        estimate_stragglers(argv[1:])
        return
    flags = read_flags(EstimateFlags, argv, "zero-bubble estimate", __doc__ or "")
    # megatron-core and torch warn of what an estimate does not use.
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)
    # Imported here, so that --help does not need torch.
    from megatron.zero_bubble.cli.estimate.estimate_tables import as_json, as_text
    from megatron.zero_bubble.cli.estimate.estimated_job import job_of
    from megatron.zero_bubble.cli.estimate.results import results_of

    results = results_of(job_of(flags), flags.schedule)
    flags.deliver(as_json(results), as_text(results, per_rank=flags.per_rank, markdown=flags.markdown))
