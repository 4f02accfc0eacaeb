"""Refuses recomputation flags with which megatron-core cannot train."""

from __future__ import annotations

from importlib.util import find_spec

from megatron.zero_bubble.trainer.arguments import Arguments

_OF_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "gdn_norm_out", "gdp_qkv", "mhc")
"""Modules that megatron-core recomputes only with Transformer Engine installed, even in local layers."""


def check_recomputation(args: Arguments, *, for_this_machine: bool) -> None:
    """Refuse recomputation flags that contradict each other, and modules that megatron-core cannot recompute.

    Args:
        for_this_machine: whether the job runs with the packages of this machine.

    Raises:
        ValueError: a flag is refused; the message names the first such flag.
    """
    if args.recompute_activations and args.recompute_granularity != "selective":
        raise ValueError(
            f"--recompute-activations is --recompute-granularity selective, but {args.recompute_granularity} is given"
        )
    modules = (args.recompute_modules or []) if args.recompute_granularity == "selective" else []
    # The recomputed MLP also returns its bias, which autograd then treats as a result of the MLP, in an endless graph.
    if "mlp" in modules and not args.disable_bias_linear:
        raise ValueError("--recompute-modules mlp needs --disable-bias-linear: megatron-core hangs with biases")
    if for_this_machine and find_spec("transformer_engine") is None:
        for module in _OF_TRANSFORMER_ENGINE:
            if module in modules:
                raise ValueError(
                    f"--recompute-modules {module} needs the package transformer_engine: leave {module} out, or use "
                    "--recompute-granularity full"
                )
