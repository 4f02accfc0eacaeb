"""Train under several schedules in turn and compare their throughput with megatron-core's own 1F1B.

    zero-bubble benchmark -- /path/to/Megatron-LM/pretrain_gpt.py <its flags>
    zero-bubble benchmark -- <flags of pretrain_gpt.py of this project>

Without --pipeline-size, the benchmark runs your own training on this machine under megatron-core's 1F1B, under
megatron-core's interleaved schedule with 2 and with 4 chunks a rank and with your own chunks or layout, and under
--zero-bubble. The benchmark then recommends a schedule and shows its speedup. The benchmark's jobs load no
checkpoint, save nothing and evaluate nothing. If the training refuses an interleaved schedule, the benchmark leaves the
schedule out and prints the reason. Zero-bubble flags after `--` apply only to the training under --zero-bubble. A
script after `--` must train with Megatron-LM's loop, and runs under the launcher (`python -m megatron.zero_bubble`).
The benchmark reads the script's times from Megatron-LM's log. Values that Megatron-LM does not print are shown as `-`,
and as null in JSON. With `--json`, the benchmark prints the recommendation in addition to the results.

    zero-bubble benchmark --pipeline-size 2 --num-microbatches 4 --schedule zb-h1 --schedule zb-2p -- \\
        --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 \\
        --micro-batch-size 2 --mock-data --vocab-size 4095

With --pipeline-size, --schedule names the schedules that the benchmark compares. For every schedule, the benchmark runs
pretrain_gpt.py as a separate job with the flags that follow `--`. Zero-bubble flags after `--` apply only to the
schedules of --schedule. megatron-core's own 1F1B always runs, as the baseline. Every schedule runs once in each round.
The column `to 1F1B` shows a schedule's speedup over 1F1B: the median, over all rounds, of the ratio of their speeds in
the round. The next column shows the bootstrap confidence interval of this median. `--schedule chosen` trains with
--zero-bubble alone, which chooses the layout; the benchmark's progress line shows this layout. The benchmark measures
bubble rates only under this project's schedules. For megatron-core's schedules, the column `predicted` is simulated
with costs that were measured under one of this project's schedules in the same placement. If measured costs include
vocabulary shards, the simulation of a megatron-core schedule moves the costs of the shards to the first and last stage.
The column `memory (MiB)` shows the allocator's peak on the fullest GPU or, without CUDA, the resident memory of the
largest process, its libraries included. With `--losses`, the benchmark also prints the largest relative difference
between the losses of every schedule and the losses of 1F1B.

A mistake in the flags ends the command with a one-line message and exit status 2. A failed job ends the command
with status 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.zero_bubble.cli.benchmark.arguments import PROG, BenchmarkFlags
from megatron.zero_bubble.cli.invocation import command, raise_on_sigterm

if TYPE_CHECKING:
    from megatron.zero_bubble.cli.benchmark.contestants import Contestant


@command(PROG, BenchmarkFlags, __doc__)
def main(flags: BenchmarkFlags) -> None:
    benchmark(flags)


def benchmark(flags: BenchmarkFlags, peers: Sequence[Contestant] = ()) -> None:
    """Train under the schedules that the flags name, and under the schedules in `peers`; print or write the results."""
    # Imported here, so that --help does not need torch.
    import torch

    from megatron.zero_bubble.session.start_up import quiet_start_up

    quiet_start_up()  # before megatron-core is imported
    from megatron.zero_bubble.cli.benchmark.advice import advice
    from megatron.zero_bubble.cli.benchmark.own_training import of_own_training
    from megatron.zero_bubble.cli.benchmark.rounds import compare_trainings
    from megatron.zero_bubble.cli.benchmark.training_results import loss_agreement, train_table

    raise_on_sigterm()
    is_own_training = flags.pipeline_size is None
    if is_own_training:
        flags, peers = of_own_training(flags, torch.cuda.device_count())
    else:
        flags = flags.of_named_schedules()
    results = compare_trainings(flags, peers)
    document: Any = [result.as_json() for result in results]
    table = train_table(results, markdown=flags.markdown)
    if flags.losses:
        table += f"\n{loss_agreement(results)}\n"
    if is_own_training:
        text = advice(results, flags.iterations)
        table += f"\n{text}\n"
        document = {"results": document, "advice": text}
    flags.deliver(document, table)
