#!/usr/bin/env python3
"""Run schedules for real and measure them: is the bubble as small as planned?

    python tools/benchmark_schedules.py --mode emulate --pipeline-size 4 --num-microbatches 8 --peers
    python tools/benchmark_schedules.py --mode emulate --schedule 1f1b --schedule zb-h1 --pipeline-size 8 \\
        --num-microbatches 16 --time-f 18.5 --time-b 18.1 --time-w 9.3 --time-comm 0.6 --json

Emulated: the executor that trains, one process a rank, and messages of --activation-bytes over gloo; in place of
compute every rank sleeps for the times of F, B and W, in milliseconds. That shows bubbles on any two cores, because
a sleeping rank needs none. A step is measured from a common start to the return of the last rank, its span is the
longest time that a rank needs from its first operation to its last, and the bubble is what the span has more than
the work. The schedules take turns, so that whatever else the machine does meets all of them; the table has medians.
--time-comm is how long a message takes at least, whatever the machine needs for it. On a machine that others use
too, `chrt -f 1` before the command keeps them out (as root).

A mistake ends with one line and exit status 2.
"""

from __future__ import annotations

import json
import sys

from benchmark_cli.arguments import parse_arguments
from benchmark_cli.emulate import emulate, emulation_table
from schedule_cli.files import deliver

from megatron.zero_bubble.schedule import ScheduleError


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv, __doc__ or "")
    try:
        results = emulate(arguments)
        if arguments.json:
            text = json.dumps([one.as_json() for one in results], indent=1) + "\n"
        else:
            text = emulation_table(results, markdown=arguments.markdown)
        deliver(text, arguments.output)
    except (ScheduleError, OSError) as error:
        print(f"benchmark_schedules.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
