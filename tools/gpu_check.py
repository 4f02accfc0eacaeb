#!/usr/bin/env python3
"""Does all of it hold on a GPU? One CUDA device is enough: numerics, the price of the split, times, memory.

    make gpu-check
    python tools/gpu_check.py --model 1.5B --json --output gpu.json
    python tools/gpu_check.py --device cpu --size tiny

Numerics: every rank of a pipeline is a thread of this process, with messages in memory; the losses and the gradients
of a step in bf16 must be, bit for bit, those of megatron-core's own schedule on the whole model. Times: a stage from
the middle of each of the zero-bubble paper's models, with B and W split and as megatron-core has it, in turn; the
executor runs it as in training, its neighbours' messages are random. From the times follow the schedules' bubble
rates for the paper's pipelines, with messages at --interconnect-bandwidth. Memory: the allocator's peak over a step
of such a stage against the simulation's.

Numerics that differ, B + W above 1.03 times the fused backward, memory that is off by more than 5%, and a model whose
stage the device has no room for end with status 1; a mistake, or no CUDA device, with one line and status 2.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpu_check_cli.sizes import NUMERICS, PROG, SIZES, Model
from schedule_cli.arguments import Parser, at_least, positive
from schedule_cli.files import deliver

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.schedule.errors import one_line

if TYPE_CHECKING:
    from gpu_check_cli.report import Findings, StageCheck

MEMORY_SCHEDULES = ("1f1b", "zb-h1", "zb-2p")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the check itself")
    parser.add_argument("--size", choices=tuple(SIZES), default="paper", help="of the models (default: the paper's)")
    parser.add_argument("--model", metavar="NAME", help="one of them only")
    parser.add_argument("--rounds", type=at_least(1), default=5, metavar="N", help="steps that are timed (default 5)")
    parser.add_argument(
        "--interconnect-bandwidth",
        type=positive,
        default=25,
        metavar="X",
        help="GB/s of the messages in the predictions (default 25)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of printing")
    arguments = parser.parse_args(argv)
    names = [model.name for model in SIZES[arguments.size]]
    if arguments.model is not None and arguments.model not in names:
        parser.error(f"argument --model: {arguments.model} is not one of {', '.join(names)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --device cpu --size tiny tries the check on a CPU")
    if arguments.device == "cpu" and torch.cuda.is_available():
        parser.error("argument --device cpu: megatron-core takes the GPU that is here; hide it, CUDA_VISIBLE_DEVICES=")
    if arguments.output is not None:
        _check_output(parser, arguments.output)
    return arguments


def _check_output(parser: Parser, output: Path) -> None:
    """Before anything is measured: what was found would be lost."""
    folder = output.parent
    if not folder.is_dir():
        parser.error(f"argument --output: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        parser.error(f"argument --output: no permission to write to {folder}")
    if output.is_dir():
        parser.error(f"argument --output: {output} is a folder; name a file")


def check(arguments: argparse.Namespace) -> Findings:
    # Only now: megatron-core looks for a device as it is imported.
    from gpu_check_cli.numerics import check_numerics
    from gpu_check_cli.report import Findings

    device = torch.device(arguments.device)
    _say("numerics")
    numerics = check_numerics(NUMERICS[arguments.size], device)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    stages: list[StageCheck] = []
    without_room: dict[str, str] = {}
    for model in SIZES[arguments.size]:
        if arguments.model not in (None, model.name):
            continue
        _say(f"a stage of {model.name}, {arguments.rounds} rounds")
        try:
            stages.append(_check_stage(model, arguments, device))
        except torch.OutOfMemoryError as error:
            without_room[model.name] = one_line(error)
        # The stage is in reference cycles, and the next one needs its memory.
        gc.collect()
        torch.cuda.empty_cache()
    return Findings(f"{name}, torch {torch.__version__}", numerics, stages, without_room)


def _check_stage(model: Model, arguments: argparse.Namespace, device: torch.device) -> StageCheck:
    from gpu_check_cli.report import StageCheck
    from gpu_check_cli.stage_run import middle_stage

    with middle_stage(model, device) as stage:
        profile = stage.profile(arguments.rounds)
        memory = [stage.check_memory(name, profile) for name in MEMORY_SCHEDULES]
    return StageCheck(model, profile, memory, _message_ms(model, arguments.interconnect_bandwidth))


def _message_ms(model: Model, gigabytes_a_second: float) -> float:
    """In bf16."""
    return 2 * model.seq_length * model.micro_batch_size * model.hidden_size / gigabytes_a_second / 1e6


def _say(what: str) -> None:
    print(what, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    warnings.filterwarnings("ignore", category=UserWarning)  # megatron-core's, about what is not installed
    torch.set_num_threads(1)
    substitution = substitute_cuda()
    try:
        findings = check(arguments)
        if arguments.json:
            text = json.dumps(findings.as_json(), indent=1) + "\n"
        else:
            text = findings.as_text(markdown=arguments.markdown)
        deliver(text, arguments.output)
    except (OSError, torch.OutOfMemoryError) as error:
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 2
    finally:
        substitution.restore()
    return 0 if findings.passed else 1


if __name__ == "__main__":
    sys.exit(main())
