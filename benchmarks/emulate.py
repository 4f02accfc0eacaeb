"""Measure schedules in real runs with emulated compute, and compare them with the simulation.

    python -m benchmarks.emulate --pipeline-size 4 --num-microbatches 8 --peers
    python -m benchmarks.emulate --schedule 1f1b --schedule zb-h1 --pipeline-size 8 --num-microbatches 16 \\
        --time-f 18.5 --time-b 18.1 --time-w 9.3 --time-comm 0.6 --json
    python -m benchmarks.emulate --schedule zb-2p --pipeline-size 4 --num-microbatches 8 \\
        --data-parallel-size 2 --time-reduce 60
    python -m benchmarks.emulate --schedule zb-2p --pipeline-size 4 --num-microbatches 8 --post-validation

Every rank is a process that runs the executor of the trainer and sends messages of --activation-bytes over gloo. In
place of computing it sleeps for the times of F, B and W, in milliseconds; because a sleeping rank needs no core, two
cores are enough. A step is measured from a common start to the return of the last rank. Its span is the longest time of
a rank from its first operation to its last, and the bubble is the part of the span that is not work. The schedules take
turns, so that other load of the machine affects all of them; the table shows medians. --time-comm is the shortest time
of a message. On a shared machine, `chrt -f 1` before the command (as root) gives it priority over other processes.

With --recompute full every schedule runs twice: with recomputation as an operation R, which takes --time-r and restores
--memory-r, and with R inside B. With --recompute planned and --memory-limit a schedule also runs recomputing nothing,
and everything, where that fits. The peak is the most activations that a rank held at once, counted.

With --offload auto and --memory-limit real tensors are copied to the host and back, by a thread at the rate that
--time-d says, and a schedule also runs without a limit.

With --data-parallel-size and --time-reduce the pipeline runs in replicas, whose gradients are reduced over an emulated
link while they compute. Every schedule that splits the backward runs twice: with the W's of its tail in microbatch
order, and parameter by parameter.

With --post-validation every schedule runs twice: once the optimizer's reduction, an all-reduce of one number, starts in
STEP and is waited for in VALIDATE, and once it ends the iteration. Two iterations fill the pipeline, then five follow
without a barrier; a step is their mean time, from the end of the last rank to its end in the next iteration.

A mistake in the flags ends with one line and exit status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.emulation.arguments import EmulationFlags
from benchmarks.emulation.emulated_results import Result, emulate, emulation_table
from benchmarks.emulation.iterations import emulate_iterations, iteration_table
from benchmarks.emulation.measured import draw_median_step, profile_of
from megatron.zero_bubble.cli.invocation import read_flags, run_command
from megatron.zero_bubble.cli.output import deliver
from megatron.zero_bubble.schedule.formats import profile_to_json

_PROG = "benchmarks.emulate"


def main(argv: list[str] | None = None) -> int:
    return run_command(_PROG, lambda: _emulate(sys.argv[1:] if argv is None else argv))


def _emulate(argv: list[str]) -> None:
    flags = read_flags(EmulationFlags, argv, _PROG, __doc__ or "")
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
