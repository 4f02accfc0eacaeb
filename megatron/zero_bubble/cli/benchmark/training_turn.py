"""Runs one training job of `zero-bubble benchmark` in separate processes, and reads the job's log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megatron.zero_bubble.cli.trainings import failure_reason
from megatron.zero_bubble.runtime.processes import end_with_parent
from megatron.zero_bubble.schedule import Idle

_ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ \|.* elapsed time per iteration \(ms\): ([\d.]+) \|")
_LOSS = re.compile(r"\biteration +(\d+)/ *\d+ \|.* lm loss: ([-+]?[\d.]+E[-+]\d+|NAN|INF) \|")
_NAN = re.compile(r"\biteration +(\d+)/.* (lm loss|grad norm): nan \|", re.IGNORECASE)
_IDLE = re.compile(r"\| imbalance: ([\d.]+)% \| bubble rate: ([\d.]+)% \|")
_PREDICTED = re.compile(r"\| predicted: ([\d.]+)% \|")
_PLANNED = re.compile(r"predicted: idle .*%\), ([\d.]+) ms")
_SUMMARY = re.compile(
    r"^ > iterations .* ms each, ([\d.]+) ms of it in the pipeline, ([\d.]+) predicted;", re.MULTILINE
)
_LAYOUT = re.compile(r"^ +chosen: (\S.*?)  +(\S.*?)  +[\d.]+  ", re.MULTILINE)
_THROUGHPUT = re.compile(r"\| throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \|")
_MEMORY = re.compile(r"memory \(MB\) \|.*\bmax allocated: ([\d.]+)")

_GRACE = 60.0
"""Seconds between SIGTERM and SIGKILL for torchrun, which itself gives its ranks 30 seconds to end."""


@dataclass(frozen=True)
class Turn:
    """The measurements of one training run; all measurements except the losses exclude the warmup iterations."""

    iteration_ms: tuple[float, ...]
    """For every logging interval, the mean time of an iteration."""
    idle: tuple[Idle, ...]
    """The idle share of every logging interval; empty if the training measures no idle time."""
    predicted_bubble_rate: float | None
    predicted_ms: float | None
    """Predicted time of an iteration in the pipeline."""
    peak_bytes: float
    """Largest peak memory of a rank's CUDA allocator; without CUDA, the resident memory of the largest process."""
    losses: tuple[tuple[int, float], ...] = ()
    """The last iteration and the mean loss of every logging interval, warmup included."""
    layout: str | None = None
    """Placement and layers of the stages that the training chose; None if the training chose no layout."""
    is_device_memory: bool = False
    tflops: tuple[float, ...] = ()
    """Printed TFLOP/s/GPU of every logging interval; empty if no value was printed or a printed value is 0."""
    pipeline_ms: float | None = None
    """Measured time of an iteration in the pipeline; None if the log has no summary."""


def printed_losses(text: str) -> tuple[tuple[int, float], ...]:
    """Return an (iteration, mean loss) pair for each line of a job's log that contains a loss."""
    return tuple((int(iteration), float(loss)) for iteration, loss in _LOSS.findall(text))


def read_log(text: str, warmup: int, resident_bytes: float) -> Turn:
    """Read from a job's log the measurements of all iterations after the first `warmup` iterations.

    Raises:
        RuntimeError: the log has no iteration after the warmup, or a loss or gradient norm is NaN.
    """
    lines = [
        (int(match[1]), float(match[2]), match.string) for match in map(_ITERATION.search, text.splitlines()) if match
    ]
    measured = [(milliseconds, line) for iteration, milliseconds, line in lines if iteration > warmup]
    if not lines:
        raise RuntimeError("the training printed no line with 'elapsed time per iteration (ms)', as Megatron-LM does")
    if not measured:
        raise RuntimeError("the training logged no iteration after its warmup")
    if broken := _NAN.search(text):
        raise RuntimeError(f"{broken[2]} of iteration {broken[1]} is NaN, so that the measured times mean nothing")
    idle = [Idle(float(match[1]) / 100, float(match[2]) / 100) for _, line in measured if (match := _IDLE.search(line))]
    predicted = _PREDICTED.search(measured[-1][1])
    summary = _SUMMARY.search(text)
    planned = [summary[2]] if summary else _PLANNED.findall(text)
    layout = _LAYOUT.search(text)
    throughput = [float(match[1]) for _, line in measured if (match := _THROUGHPUT.search(line))]
    # Without CUDA, Megatron-LM under the launcher prints 0.00 as the allocator's memory.
    memory = [float(value) * 2**20 for value in _MEMORY.findall(text) if float(value) > 0]
    return Turn(
        tuple(milliseconds for milliseconds, _ in measured),
        tuple(idle),
        float(predicted[1]) / 100 if predicted else None,
        float(planned[-1]) if planned else None,
        max(memory, default=resident_bytes),
        printed_losses(text),
        f"{layout[1]} {layout[2]}" if layout else None,
        bool(memory),
        tuple(throughput) if all(throughput) else (),
        float(summary[1]) if summary else None,
    )


def take_turn(command: Sequence[str], environment: Mapping[str, str], warmup: int, timeout: float) -> Turn:
    """Run a training job to its end and return its measurements.

    Raises:
        RuntimeError: the training failed or took longer than `timeout` seconds; the message is one line.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
        over, late = threading.Event(), threading.Event()
        guard = threading.Thread(target=_end_when_late, args=(process.pid, timeout, over, late), daemon=True)
        guard.start()
        try:
            # `wait4`, unlike `Popen.wait`, reports the peak memory of the job's largest process.
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            os.kill(process.pid, signal.SIGTERM)
            os.waitpid(process.pid, 0)
            raise
        finally:
            over.set()
            guard.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        text = log.read()
    if process.returncode != 0:
        reason = failure_reason(text) or f"it ended with status {process.returncode}"
        raise RuntimeError(f"ended because it was not done within --timeout {timeout:g} s" if late.is_set() else reason)
    return read_log(text, warmup, usage.ru_maxrss * 1024.0)


def _end_when_late(launcher: int, timeout: float, over: threading.Event, late: threading.Event) -> None:
    """If `over` is not set within `timeout` seconds, set the event `late` and end the process with ID `launcher`."""
    if not over.wait(timeout):
        late.set()
        # torchrun ends its ranks after SIGTERM; after SIGKILL, its ranks would keep running.
        os.kill(launcher, signal.SIGTERM)
        if not over.wait(_GRACE):
            os.kill(launcher, signal.SIGKILL)
