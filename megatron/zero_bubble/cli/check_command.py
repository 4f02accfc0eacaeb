"""Check numerics, the cost of splitting the backward, times, memory and messages on one CUDA device.

    zero-bubble check
    zero-bubble check --model 1.5B --output h200.json
    zero-bubble check --device cpu --size tiny

`zero-bubble check` needs no network, and has two parts:

stages    One stage from the middle of each model of the zero-bubble paper runs as in training, with random messages.
          Steps whose backward is split into B and W alternate with steps that have megatron-core's fused backward. The
          bubble rates of the zero-bubble paper's pipelines are simulated with the measured times, and with messages at
          the bandwidth of --interconnect-bandwidth. The allocator's peak over a step is compared with the simulated
          peak of the activations plus the temporary memory of one operation. With --transformer-impl transformer_engine
          the layers are Transformer Engine's.
ranks     Four processes share the device and train: over gloo through host memory and, where NCCL allows shared
          devices, also over NCCL. All jobs run with many hardware queues and with one hardware queue. The
          --log-numerics files of our schedules must equal the files of megatron-core's own schedule byte for byte. With
          the V placement, only the losses must be equal. With vocabulary shards, losses may differ by 1%.

At the end the command prints tables and writes all findings to a JSON file. The command ends with status 1 if numerics
differ, a job fails or takes too long, B + W takes more than 1.03 times the fused backward, memory differs from the
simulation by more than 5%, or a stage does not fit on the device. After a mistake in the flags, or without a CUDA
device, the command ends with a one-line message and status 2.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.zero_bubble.cli.check.arguments import PARTS, CheckFlags
from megatron.zero_bubble.cli.check.matrix import cells, chosen
from megatron.zero_bubble.cli.check.models import PROG, SIZES, Model
from megatron.zero_bubble.cli.invocation import command, raise_on_sigterm
from megatron.zero_bubble.cli.output import deliver
from megatron.zero_bubble.cli.shared_flags import to_json
from megatron.zero_bubble.cli.trainings import one_process
from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.schedule.errors import one_line

if TYPE_CHECKING:
    from megatron.zero_bubble.cli.check.findings import Findings, StageCheck

MEMORY_SCHEDULES = ("1f1b", "zb-h1", "zb-2p")


def check(flags: CheckFlags, scratch: Path) -> Findings:
    """Run every part of the check that the flags ask for, even if an earlier part fails.

    Args:
        scratch: a folder for temporary files.
    """
    # Imported after `substitute_cuda`, because the import of megatron-core looks for a device.
    from megatron.zero_bubble.cli.check.findings import Findings, describe_machine
    from megatron.zero_bubble.cli.check.rank_check import RankCheck

    results: dict[str, Any] = {"stages": [], "without_room": {}}
    errors: dict[str, str] = {}

    def stages() -> None:
        for model in SIZES[flags.size]:
            if flags.model in (None, model.name):
                _check_stage(replace(model, transformer_impl=flags.transformer_impl), flags, results)

    def ranks() -> None:
        rank_check = RankCheck(flags.device == "cuda", scratch, flags.time_limit)
        results["ranks"] = rank_check.run(chosen(cells(flags.size, scratch, flags.transformer_impl), flags.cell or ()))

    for name, part in zip(PARTS, (stages, ranks), strict=True):
        if name in (flags.only or PARTS):
            try:
                part()
            except Exception as error:
                traceback.print_exc()
                errors[name] = f"{type(error).__name__}: {one_line(error)}"
    return Findings(describe_machine(), errors=errors, **results)


def _check_stage(model: Model, flags: CheckFlags, results: dict[str, Any]) -> None:
    print(f"measuring a stage of {model.name}, {flags.rounds} rounds", file=sys.stderr)
    try:
        results["stages"].append(_measure_stage(model, flags))
    except torch.OutOfMemoryError as error:
        results["without_room"][model.name] = one_line(error)
    # Reference cycles keep the memory of this stage alive, and the next stage needs the memory.
    gc.collect()
    torch.cuda.empty_cache()


def _measure_stage(model: Model, flags: CheckFlags) -> StageCheck:
    from megatron.zero_bubble.cli.check.findings import StageCheck
    from megatron.zero_bubble.cli.check.stage_run import NUM_RANKS, MiddleStage

    with one_process(model.arguments(NUM_RANKS)):
        stage = MiddleStage(model, torch.device(flags.device))
        profile = stage.profile(flags.rounds)
        memory = [stage.check_memory(name, profile) for name in MEMORY_SCHEDULES]
    times = ", ".join(f"{kind} {profile.time(kind):.3f} ms" for kind in profile.times)
    print(f"{times}, (B + W) / fused {profile.price:.3f}", file=sys.stderr)
    message_bytes = 2 * model.seq_length * model.micro_batch_size * model.hidden_size  # in bf16
    return StageCheck(model, profile, memory, message_bytes / flags.interconnect_bandwidth / 1e6)


@command(PROG, CheckFlags, __doc__)
def main(flags: CheckFlags) -> bool:
    """Run `zero-bubble check`, write the findings, and return whether all parts of the check passed."""
    warnings.filterwarnings("ignore", category=UserWarning)  # megatron-core warns of packages that are not installed
    torch.set_num_threads(1)
    raise_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        try:
            substitution = substitute_cuda()
            try:
                findings = check(flags, Path(folder))
            finally:
                substitution.restore()
        except ModuleNotFoundError as error:
            raise ValueError(f"{error}: the check needs this package (docs/gpu.md says how to bring it)") from error
        deliver(to_json(findings.as_json()), flags.output)
        deliver(findings.as_text(markdown=flags.markdown), None)
    print(f"all findings, to attach to a report: {flags.output.resolve()}")
    return findings.passed
