"""Entry point of `torchrun ... -m megatron.zero_bubble SCRIPT ARGUMENTS`, described in docs/megatron_lm.md."""

from __future__ import annotations

import sys

from megatron.zero_bubble.launcher.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
