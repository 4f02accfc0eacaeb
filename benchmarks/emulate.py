"""Run schedules for real with emulated compute and measure them: is the bubble as small as planned?

    python -m benchmarks.emulate --pipeline-size 4 --num-microbatches 8 --peers
    python -m benchmarks.emulate --schedule 1f1b --schedule zb-h1 --pipeline-size 8 --num-microbatches 16 \\
        --time-f 18.5 --time-b 18.1 --time-w 9.3 --time-comm 0.6 --json
    python -m benchmarks.emulate --schedule zb-2p --pipeline-size 4 --num-microbatches 8 \\
        --data-parallel-size 2 --time-reduce 60
    python -m benchmarks.emulate --schedule zb-2p --pipeline-size 4 --num-microbatches 8 --post-validation

Emulated: the executor that trains, one process a rank, and messages of --activation-bytes over gloo; in place of
compute every rank sleeps for the times of F, B and W, in milliseconds. That shows bubbles on any two cores, because
a sleeping rank needs none. A step is measured from a common start to the return of the last rank, its span is the
longest time that a rank needs from its first operation to its last, and the bubble is what the span has more than
the work. The schedules take turns, so that whatever else the machine does meets all of them; the table has medians.
--time-comm is how long a message takes at least, whatever the machine needs for it. On a machine that others use
too, `chrt -f 1` before the command keeps them out (as root).

With --data-parallel-size and --time-reduce the pipeline runs in replicas, whose gradients are reduced over an emulated
link while they compute. Schedules run with the W's of their tail in microbatch order, and parameter by parameter.

With --post-validation every schedule runs twice: with the optimizer's reduction, an all-reduce of one number, started
in STEP and waited for in VALIDATE, and with iterations that end with it. Five iterations follow each other without a
barrier, after two that fill the pipeline; a step is then their mean time, from the last rank's end to its next.

A mistake ends with one line and exit status 2.
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
