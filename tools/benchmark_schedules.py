#!/usr/bin/env python3
"""Run schedules for real and measure them: is the bubble as small as planned?

    python tools/benchmark_schedules.py --mode emulate --pipeline-size 4 --num-microbatches 8 --peers
    python tools/benchmark_schedules.py --mode emulate --schedule 1f1b --schedule zb-h1 --pipeline-size 8 \\
        --num-microbatches 16 --time-f 18.5 --time-b 18.1 --time-w 9.3 --time-comm 0.6 --json
    python tools/benchmark_schedules.py --mode emulate --schedule zb-2p --pipeline-size 4 --num-microbatches 8 \\
        --data-parallel-size 2 --time-reduce 60
    python tools/benchmark_schedules.py --mode emulate --schedule zb-2p --pipeline-size 4 --num-microbatches 8 \\
        --post-validation
    python tools/benchmark_schedules.py --mode train --pipeline-size 2 --num-microbatches 4 --schedule zb-h1 \\
        --schedule zb-2p --peers -- --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 \\
        --micro-batch-size 2 --mock-data --vocab-size 4095

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

Trained: pretrain_gpt.py itself, a job for every schedule, with the flags that follow `--`. megatron-core's own 1F1B
always runs, as what the others are compared with. The schedules take turns, and a turn's ratio is taken to the turn of
1F1B in the same round; `to 1F1B` is the median of these, its interval a bootstrap over rounds. --peers runs
megatron-core's interleaved schedule and torch.distributed.pipelining's schedules on the same layers, data, optimizer
and loop (tools/pretrain_gpt_torch.py).
What measures bubbles are our schedules' runs; `predicted` of megatron-core's, and of torch's where the order is the
same, is simulated from the costs that a run of ours in the same placement measured. Memory is the allocator's peak on
the fullest GPU; without CUDA it is the resident memory of the largest process, its libraries included.

A mistake ends with one line and exit status 2, a training that fails with status 1.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence

from benchmark_cli.arguments import parse_arguments
from benchmark_cli.emulate import Result, emulate, emulation_table
from benchmark_cli.iterations import emulate_iterations, iteration_table
from benchmark_cli.measured import draw_median_step, profile_of
from benchmark_cli.train import compare_trainings
from benchmark_cli.train_arguments import parse_train_arguments, wants_training
from benchmark_cli.train_report import train_plot, train_table
from schedule_cli.files import deliver

from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.schedule.formats import profile_to_json


def main(argv: list[str] | None = None) -> int:
    try:
        _train(argv) if wants_training(argv) else _emulate(argv)
    except (ValueError, OSError) as error:
        return _report(error, 2)
    except RuntimeError as error:
        return _report(error, 1)
    return 0


def _emulate(argv: list[str] | None) -> None:
    arguments = parse_arguments(argv, __doc__ or "")
    results: Sequence[Result]
    if arguments.post_validation:
        results = iterations = emulate_iterations(arguments)
        text = iteration_table(iterations, markdown=arguments.markdown)
    else:
        results = emulate(arguments)
        text = emulation_table(results, markdown=arguments.markdown)
    ours = [one for one in results if one.edges is not None]
    if arguments.profile_output is not None:
        deliver(profile_to_json(profile_of(ours[0])), arguments.profile_output)
    if arguments.timeline is not None:
        for one in ours:
            draw_median_step(one, arguments.timeline)
    if arguments.json:
        text = json.dumps([one.as_json() for one in results], indent=1) + "\n"
    deliver(text, arguments.output)


def _train(argv: list[str] | None) -> None:
    arguments = parse_train_arguments(argv, __doc__ or "")
    # As an exception, so that the training under way is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    results = compare_trainings(arguments)
    if arguments.json:
        text = json.dumps([one.as_json() for one in results], indent=1) + "\n"
    else:
        text = train_table(results, markdown=arguments.markdown)
    deliver(text, arguments.output)
    if arguments.plot is not None:
        deliver(train_plot(results), arguments.plot)


def _report(error: Exception, status: int) -> int:
    print(f"benchmark_schedules.py: error: {one_line(error)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
