"""Entry point of the command `zero-bubble`. Without an installation, use `python -m megatron.zero_bubble.cli`."""

from __future__ import annotations

import sys
from importlib import import_module, metadata

_COMMANDS = {
    "schedule": "make, simulate, compare, validate and draw pipeline schedules",
    "plan": "choose the layout and the schedule of a model from the costs of its layers",
    "estimate": "predict memory and throughput of a training under every schedule",
    "benchmark": "train under several schedules in turn and compare them with megatron-core's 1F1B",
    "check": "compare numerics, times, memory and messages on one CUDA device",
    "playground": "change and compare schedules in a browser",
}
_HELP = f"""\
usage: zero-bubble COMMAND ...

Zero-bubble pipeline parallelism for Megatron: plan, estimate, measure, check and draw schedules.

commands:
{chr(10).join(f"  {name:<10} {summary}" for name, summary in _COMMANDS.items())}

examples:
  zero-bubble schedule compare --pipeline-size 8 --num-microbatches 32 --time-f 10 --time-b 9 --time-w 7
  zero-bubble plan --costs units.json --pipeline-size 4 --num-microbatches 16
  zero-bubble estimate --world-size 8 -- --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
      --seq-length 2048 --vocab-size 50257 --bf16 --pipeline-model-parallel-size 8 --micro-batch-size 1 \\
      --global-batch-size 32
  zero-bubble benchmark --pipeline-size 2 --num-microbatches 8 --schedule zb-h1 -- --num-layers 8 \\
      --hidden-size 512 --num-attention-heads 8 --seq-length 256 --micro-batch-size 2 --mock-data --vocab-size 4095
  zero-bubble check
  zero-bubble playground

`zero-bubble COMMAND --help` lists the flags of a command; `zero-bubble --version` prints the version. Trainings start
with `torchrun ... -m megatron.zero_bubble SCRIPT` (your Megatron-LM) or `torchrun ... pretrain_gpt.py` (from a clone).
"""


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand that the first command-line word names; return its exit status, or 130 after Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        print(_HELP, end="", file=sys.stderr)
        return 2
    try:
        if words[0] in ("-h", "--help", "--version"):
            from megatron.zero_bubble.cli.invocation import run_command
            from megatron.zero_bubble.cli.output import deliver

            text = f"{_version()}\n" if words[0] == "--version" else _HELP
            return run_command("zero-bubble", lambda: deliver(text, None))
        if words[0] in _COMMANDS:
            # Only this command is imported: `schedule` then loads in a tenth of a second, because it needs no torch.
            return int(import_module(f"megatron.zero_bubble.cli.{words[0]}_command").main(words[1:]))
    except KeyboardInterrupt:  # raised during an import; a running command handles Ctrl-C itself
        return 130
    print(f"zero-bubble: error: {words[0]!r} is not one of {', '.join(_COMMANDS)}", file=sys.stderr)
    return 2


def _version() -> str:
    """Return the name of the installed package and its version."""
    package = "megatron-zero-bubble"
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} is not installed: this is a clone"


if __name__ == "__main__":
    sys.exit(main())
