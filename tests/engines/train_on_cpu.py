"""The launcher's command line, for layers of Transformer Engine on a CPU.

PYTHONOPTIMIZE=1 torchrun --nproc-per-node 2 -m tests.engines.train_on_cpu --zero-bubble-cpu FLAGS SCRIPT ARGUMENTS
"""

from __future__ import annotations

import runpy

from tests.engines.engine_on_cpu import import_engine, use_local_attention_and_norms


def main() -> None:
    import_engine()

    from megatron.zero_bubble.mcore.cpu import substitute_cuda

    # The launcher makes the same substitutions again, for as long as the script runs.
    substitutions = substitute_cuda()
    use_local_attention_and_norms()
    substitutions.restore()
    runpy.run_module("megatron.zero_bubble", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
