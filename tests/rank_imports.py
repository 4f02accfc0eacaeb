"""Imports what every rank needs, in the process that `tests.launch` forks ranks from: they are paid for once."""

from __future__ import annotations

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # threads would not survive the fork, and the ranks share few cores

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.session.start_up import quiet_start_up

quiet_start_up()
substitute_cuda()

import megatron.zero_bubble.trainer.pretrain  # noqa: E402, F401
import tests.trainings  # noqa: E402, F401

gc.freeze()  # collecting the modules' objects takes a second
