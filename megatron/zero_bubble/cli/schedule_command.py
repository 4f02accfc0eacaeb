"""Make, measure, compare, check and draw pipeline schedules, without a GPU and without torch.

    zero-bubble schedule list
    zero-bubble schedule simulate --schedule zb-h1 --pipeline-size 4 --num-microbatches 8
    zero-bubble schedule compare --schedule 1f1b --schedule zb-h1 --pipeline-size 8 --num-microbatches 24 \\
        --time-f 18.5 --time-b 18.1 --time-w 9.3 --time-comm 0.6
    zero-bubble schedule draw --schedule zb-h2 --pipeline-size 4 --num-microbatches 8 --output zb-h2.svg

A mistake ends with one line and exit status 2, and nothing is written.
"""

from __future__ import annotations

from megatron.zero_bubble.cli.output import run_command
from megatron.zero_bubble.cli.schedule.arguments import parse_arguments
from megatron.zero_bubble.cli.schedule.commands import COMMANDS


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv, __doc__ or "")
    return run_command(f"zero-bubble schedule {arguments.command}", lambda: COMMANDS[arguments.command](arguments))
