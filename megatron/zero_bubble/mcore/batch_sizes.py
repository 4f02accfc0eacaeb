"""Reads and writes megatron-core's schedules of global batch sizes (`--step-batch-size-schedule`, from 0.18 on)."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

_STEPS = "StepBatchsizeNumMicroBatchesCalculator"
"""Class of megatron-core, from 0.18 on, that reads the schedule."""


def has_steps() -> bool:
    """Whether the installed megatron-core changes batch sizes by steps; it then ignores `--rampup-batch-size`."""
    from megatron.core import num_microbatches_calculator

    return hasattr(num_microbatches_calculator, _STEPS)


def sizes_of_steps(text: str) -> tuple[int, ...]:
    """Return the different global batch sizes of a `--step-batch-size-schedule`, in ascending order.

    Args:
        text: the value of the flag, such as "0:768 250B:1536".

    Raises:
        ValueError: an entry of the text is not a pair THRESHOLD:SIZE.
    """
    from megatron.core import num_microbatches_calculator

    try:
        steps = getattr(num_microbatches_calculator, _STEPS)._parse_schedule(text, None)
    except ValueError as error:
        raise ValueError(f"--step-batch-size-schedule {text}: {error}") from error
    return tuple(sorted({size for _, size in steps}))


def ramp_as_steps(ramp: Sequence[int], largest: int) -> str:
    """Return the `--step-batch-size-schedule` with the same batch sizes as a `--rampup-batch-size`.

    Args:
        ramp: START INCREMENT SAMPLES, where START plus a multiple of INCREMENT is `largest`.
        largest: the global batch size after the ramp.

    Returns:
        The schedule, with thresholds in consumed sequences.
    """
    start, increment, samples = ramp
    num_steps = (largest - start) // increment
    length = samples / num_steps
    sizes = {}
    for step in range(num_steps + 1):
        threshold = floor(step * length)
        while threshold / length < step:  # megatron-core's ramp computes the step in the same way
            threshold += 1
        sizes[threshold] = start + step * increment
    return " ".join(f"{threshold}:{size}" for threshold, size in sizes.items())
