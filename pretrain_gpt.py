"""Pretrain a GPT: torchrun --nproc-per-node 4 pretrain_gpt.py <Megatron flags> --zero-bubble."""

from __future__ import annotations

import sys

from megatron.zero_bubble.trainer.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
