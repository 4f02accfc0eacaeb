"""Measure schedules in real runs with emulated compute, and compare them with the simulation.

    python -m benchmarks.emulate --pipeline-size 4 --num-microbatches 8 --peers
    python -m benchmarks.emulate --schedule 1f1b --schedule zb-h1 --pipeline-size 8 --num-microbatches 16 \\
        --time-f 18.5 --time-b 18.1 --time-w 9.3 --time-comm 0.6 --json
    python -m benchmarks.emulate --schedule zb-2p --pipeline-size 4 --num-microbatches 8 \\
        --data-parallel-size 2 --time-reduce 60
    python -m benchmarks.emulate --schedule zb-2p --pipeline-size 4 --num-microbatches 8 --post-validation

Every rank is a process that runs the executor of the trainer and sends messages of --activation-bytes over gloo. To
emulate a computation, a rank sleeps for the time of F, B or W, given in milliseconds; because a sleeping rank needs no
core, two cores are enough. A step is measured from a start time that is common to all ranks to the return of the last
rank. The span of a step is the longest time of a rank from its first operation to its last, and the bubble is the part
of the span in which the rank does not work. The schedules take turns, so that other load of the machine affects all
schedules; the table shows medians. --time-comm is the shortest time of a message. On a shared machine, `chrt -f 1`
before the command (as root) gives the ranks priority over other processes.

With --recompute full, every schedule runs twice: with a separate operation R, which takes --time-r and restores
--memory-r, and with the recomputation inside B. With --recompute planned and --memory-limit, every schedule also runs
without recomputation and with full recomputation, if these variants fit in the limit. The peak in the table is the
largest counted amount of activations on any rank.

With --offload auto and --memory-limit, a thread copies real tensors to the host and back at the rate that --time-d
gives, and every schedule also runs without a memory limit.

With --data-parallel-size and --time-reduce, the pipeline runs in several replicas, which reduce their gradients over an
emulated link during the computation. Every schedule that splits the backward then runs twice: with the last W of each
rank in microbatch order, and with the last W ordered by parameter.

With --post-validation, every schedule runs twice. In one run, the optimizer's reduction, an all-reduce of one number,
starts in STEP, and VALIDATE waits for the result; in the other run, the reduction ends the iteration. Two iterations
fill the pipeline, and five measured iterations follow without a barrier. An iteration ends when its last rank ends, and
a step is the mean time between the ends of consecutive iterations.

A mistake in the flags ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.emulation.arguments import EmulationFlags
from benchmarks.emulation.emulated_results import Result, emulate, emulation_table
from benchmarks.emulation.iterations import emulate_iterations, iteration_table
from benchmarks.emulation.measured import draw_median_step, profile_of
from megatron.zero_bubble.cli.invocation import command
from megatron.zero_bubble.cli.output import deliver
from megatron.zero_bubble.schedule.formats import profile_to_json


@command("benchmarks.emulate", EmulationFlags, __doc__)
def main(flags: EmulationFlags) -> None:
    results: Sequence[Result]
    if flags.post_validation:
        results = iterations = emulate_iterations(flags)
        text = iteration_table(iterations, markdown=flags.markdown)
    else:
        results = emulate(flags)
        text = emulation_table(results, markdown=flags.markdown)
    ours = [one for one in results if one.edges is not None]
    if flags.profile_output is not None:
        deliver(profile_to_json(profile_of(ours[0])), flags.profile_output)
    if flags.timeline is not None:
        for one in ours:
            draw_median_step(one, flags.timeline)
    flags.deliver([one.as_json() for one in results], text)


if __name__ == "__main__":
    sys.exit(main())
