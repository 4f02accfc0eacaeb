#!/usr/bin/env python3
"""Make, measure, compare, check and draw pipeline schedules, without a GPU and without torch.

    python tools/schedule.py list
    python tools/schedule.py simulate --schedule zb-h1 --pipeline-size 4 --num-microbatches 8
    python tools/schedule.py compare --schedule 1f1b --schedule zb-h1 --pipeline-size 8 --num-microbatches 24 \\
        --time-f 18.5 --time-b 18.1 --time-w 9.3 --time-comm 0.6
    python tools/schedule.py draw --schedule zb-h2 --pipeline-size 4 --num-microbatches 8 --output zb-h2.svg

A mistake ends with one line and exit status 2, and nothing is written.
"""

from __future__ import annotations

import sys

from schedule_cli.arguments import parse_arguments
from schedule_cli.commands import COMMANDS

from megatron.zero_bubble.schedule import ScheduleError
from megatron.zero_bubble.schedule.errors import one_line


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv, __doc__ or "")
    try:
        COMMANDS[arguments.command](arguments)
    except (ScheduleError, OSError) as error:
        print(f"schedule.py {arguments.command}: error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
