"""The flags of zero-bubble estimate."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.zero_bubble.cli.estimate.cluster import Cluster, States
from megatron.zero_bubble.cli.estimate.schedule_estimate import Job
from megatron.zero_bubble.cli.schedule.arguments import Parser, at_least, positive
from megatron.zero_bubble.cli.trainings import complete_arguments
from megatron.zero_bubble.runtime.planning import MemoryLimit
from megatron.zero_bubble.schedule import ScheduleError
from megatron.zero_bubble.schedule.formats import Profile, profile_from_json
from megatron.zero_bubble.training.arguments import Arguments

PROG = "zero-bubble estimate"
_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--mock-data")
_STAND_INS = {"--train-iters": "1000000000", "--lr": "1e9"}
"""Of what a training needs and an estimate does not: above whatever other flags ask of them."""


def parse_arguments(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """Parse, or exit with status 2 and one line. What follows `--` is in `training_flags`, unread."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog=PROG,
        usage="%(prog)s [options] -- <pretrain_gpt.py's flags>",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--world-size", type=at_least(2), required=True, metavar="N", help="devices of the job")
    cluster.add_argument(
        "--device-memory", type=_bytes, default=80 * 2**30, metavar="SIZE", help="of one device (default 80GiB)"
    )
    cluster.add_argument(
        "--reserved-memory",
        type=_bytes,
        default=3 * 2**30,
        metavar="SIZE",
        help="of it that no tensor gets: context, communication buffers, fragments (default 3GiB)",
    )
    numbers = (
        ("device-tflops", 312, "dense peak of one device in the training's precision, TFLOP/s (default 312: A100)"),
        ("mfu", 0.45, "fraction of the peak that layers reach (default 0.45); better measured: --profile"),
        ("interconnect-bandwidth", 25, "GB/s of a message to another device (default 25: one 200 Gbit/s link)"),
        ("interconnect-latency", 20, "microseconds of an empty message (default 20)"),
    )
    for name, default, what in numbers:
        cluster.add_argument(f"--{name}", type=positive, default=default, metavar="X", help=what)
    parser.add_argument(
        "--zero-stage",
        type=int,
        choices=(0, 1, 2, 3),
        help="what data-parallel ranks divide among them (default: 1 with --use-distributed-optimizer, else 0)",
    )
    parser.add_argument(
        "--schedule", action="append", metavar="NAME", help="repeat for more (default: all but optimal)"
    )
    parser.add_argument(
        "--num-chunks",
        type=at_least(2),
        metavar="V",
        help="model chunks a rank of interleaved schedules (default: the flags', else 2)",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="costs that --zero-bubble-profile-output of such a run wrote"
    )
    parser.add_argument("--per-rank", action="store_true", help="a line for every pipeline rank of every schedule")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of printing")
    cut = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:cut])
    if arguments.mfu > 1:
        parser.error(f"argument --mfu: must not be above 1, got {arguments.mfu:g}")
    arguments.training_flags = words[cut + 1 :]
    return arguments


def _bytes(text: str) -> float:
    limit = None
    with contextlib.suppress(ValueError):
        limit = MemoryLimit.parse(text).num_bytes
    if limit is None:
        raise argparse.ArgumentTypeError(f"expected bytes such as 80GiB, got {text!r}")
    return limit


def job_of(arguments: argparse.Namespace) -> Job:
    """The job that the flags describe. Raises `ValueError`."""
    flags = _with_stand_ins(arguments.training_flags)
    args = complete_arguments(flags, arguments.world_size, PROG, has_cuda=True, for_this_machine=False)
    if args.pipeline_model_parallel_size < 2:
        raise ValueError("schedules need --pipeline-model-parallel-size of at least 2")
    if args.mtp_num_layers is not None:
        raise ValueError("--mtp-num-layers: what further layers cost the last stage is not estimated; leave it out")
    stage = arguments.zero_stage
    if stage is None:
        stage = int(args.use_distributed_optimizer)
    cluster = Cluster(
        memory=arguments.device_memory,
        reserved=arguments.reserved_memory,
        flops=arguments.device_tflops * 1e12 * arguments.mfu,
        bandwidth=arguments.interconnect_bandwidth * 1e9,
        latency=arguments.interconnect_latency * 1e-6,
    )
    return Job(args, cluster, States.of(args, stage), _profile(arguments.profile, args), arguments.num_chunks)


def _with_stand_ins(flags: Sequence[str]) -> list[str]:
    given = {word.split("=", 1)[0] for word in flags}
    missing = [word for name, value in _STAND_INS.items() if name not in given for word in (name, value)]
    return [*flags, *missing, *([] if given.intersection(_DATA) else ["--mock-data"])]


def _profile(path: Path | None, args: Arguments) -> Profile | None:
    if path is None:
        return None
    # Only now: what describes a model is known to what plans for it, which imports megatron-core.
    from megatron.zero_bubble.job.profiling import model_description

    try:
        profile = profile_from_json(path.read_text(encoding="utf-8"))
        profile.check_fits(profile.placement, model_description(args))
    except (OSError, UnicodeDecodeError, ScheduleError) as error:
        raise ValueError(f"--profile {path}: {error}") from error
    return profile
