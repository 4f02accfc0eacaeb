"""Train synchronously and with hierarchical SGD, and draw both losses in one plot.

    python tools/make_sample_data.py
    python -m benchmarks.averaging_losses --num-ranks 4 --hierarchical-sgd 2:2,4:4 --hierarchical-lr 4e-3 \\
        --plot losses.svg -- \\
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 8 \\
        --global-batch-size 32 --train-iters 200 --lr 2e-3 --lr-warmup-iters 20 --log-interval 10 \\
        --eval-interval 200 --eval-iters 8 --data-path .cache/sample/stdlib_text_document \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model .cache/sample/tokenizer.json \\
        --data-cache-path .cache/index

The flags after `--` are pretrain_gpt.py's flags of both trainings; --hierarchical-lr replaces --lr in the training with
hierarchical SGD. The table has the loss of the last log line, and the validation loss after the last iteration, which
exists only if --eval-interval divides --train-iters. The exit status is 1 if the last logged losses of the two
trainings differ by more than --tolerance. A user's mistake ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.zero_bubble.cli.benchmark.training_turn import printed_losses
from megatron.zero_bubble.cli.invocation import FollowingFlags, at_least, command, positive
from megatron.zero_bubble.cli.output import deliver, table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.cli.trainings import failure_reason
from megatron.zero_bubble.schedule.draw import Series, to_plot
from megatron.zero_bubble.session.flag_parser import flag

_VALIDATION = re.compile(r" validation loss at iteration \d+ \| lm loss value: (\S+) \|")


@dataclass(frozen=True)
class AveragingFlags(TableFlags, FollowingFlags):
    """the trainings"""

    num_ranks: int = flag("ranks of each training", 4, parse=at_least(2), metavar="N")
    hierarchical_sgd: str = flag("PERIOD:SIZE,...: the training's flag", "2:2,4:4", metavar="LEVELS")
    hierarchical_sgd_warmup: int = flag("the training's flag", 0, parse=at_least(0), metavar="STEPS")
    hierarchical_lr: float | None = flag(
        "learning rate of the hierarchical training; by default that of both", None, parse=positive, metavar="LR"
    )
    tolerance: float = flag("largest relative difference of the last losses", 0.02, parse=positive, metavar="X")
    plot: Path | None = flag("draw the losses", None, parse=Path, metavar="FILE.svg")


class Losses(NamedTuple):
    """Losses of one training."""

    training: tuple[tuple[int, float], ...]
    """(iteration, mean loss since the previous log line) of every log line."""
    validation: float | None
    """The loss of the last evaluation; None if the training evaluated nothing."""


def train(flags: AveragingFlags, more: Sequence[str]) -> Losses:
    """Train with `flags.training_flags` and the flags `more`, and return the losses.

    Raises:
        RuntimeError: the training failed.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(flags.num_ranks)]
    command = [*start, "-m", "megatron.zero_bubble.trainer", *flags.training_flags, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(failure_reason(result.stderr) or f"a training ended with status {result.returncode}")
    lines = printed_losses(result.stdout)
    if not lines:
        raise RuntimeError("a training printed no loss: choose a smaller --log-interval")
    validations = _VALIDATION.findall(result.stdout)
    return Losses(lines, float(validations[-1]) if validations else None)


@command("benchmarks.averaging_losses", AveragingFlags, __doc__)
def main(flags: AveragingFlags) -> bool:
    levels = ("--hierarchical-sgd", flags.hierarchical_sgd)
    warmup = ("--hierarchical-sgd-warmup", str(flags.hierarchical_sgd_warmup)) if flags.hierarchical_sgd_warmup else ()
    own_rate = () if flags.hierarchical_lr is None else ("--lr", str(flags.hierarchical_lr))
    losses = {
        "synchronous": train(flags, ()),
        f"hierarchical {flags.hierarchical_sgd}": train(flags, (*levels, *warmup, *own_rate)),
    }
    if flags.plot is not None:
        series = [Series(name, each.training) for name, each in losses.items()]
        title = f"Loss of {flags.num_ranks} ranks"
        deliver(to_plot(series, title=title, x_label="iteration", y_label="loss"), flags.plot)
    synchronous, hierarchical = losses.values()
    difference = hierarchical.training[-1][1] / synchronous.training[-1][1] - 1
    rows = [
        (name, f"{each.training[-1][1]:.4f}", "-" if each.validation is None else f"{each.validation:.4f}")
        for name, each in losses.items()
    ]
    heads = ("SGD", "last loss", "validation")
    text = table(heads, rows, markdown=flags.markdown) + f"difference of the last loss: {difference:+.2%}\n"
    flags.deliver({name: each._asdict() for name, each in losses.items()}, text)
    return abs(difference) <= flags.tolerance


if __name__ == "__main__":
    sys.exit(main())
