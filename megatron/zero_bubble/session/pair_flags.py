"""Says which flags `--overlap-moe-expert-parallel-comm` does not support. Imports no megatron.core."""

from __future__ import annotations

from megatron.zero_bubble.session.job_flags import JobFlags

_FLAG = "--overlap-moe-expert-parallel-comm"


def check_pairs(flags: JobFlags) -> None:
    """Raise `ValueError` for a flag that pairs of a forward and a backward do not support."""
    if not flags.overlap_moe_expert_parallel_comm:
        return
    if flags.mtp_num_layers and not flags.untie_embeddings_and_output_weights:
        raise ValueError(
            f"{_FLAG} adds the gradients of a weight that embedding and output layer share in another order, and so "
            f"rounds them otherwise, with --mtp-num-layers {flags.mtp_num_layers}: give "
            "--untie-embeddings-and-output-weights or leave one of them out"
        )
    if flags.use_torch_fsdp2:
        raise ValueError(
            f"{_FLAG} runs the parts of a layer one by one, without the layer's own forward, which --use-torch-fsdp2 "
            "needs: leave one of them out"
        )
