"""Gives each stage of a script's model its layers, embedding and loss on the rank that the placement chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch.utils._pytree import tree_map_only

from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.mcore.multi_token import track, tracked_sums
from megatron.zero_bubble.mcore.placement import PlacedLayout, chunk_groups, copy_tied_embedding, embedding_ranks
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern


class ScriptStages:
    """Puts the stages of a script's model on the ranks of a placement.

    A V placement has the first and the last stage on rank 0. The forward step of a script reads data if megatron-core
    says that the current stage is the first or the last stage. A script logs the losses on the last rank.

    Args:
        layout: the layers of each stage, in model order, in megatron-core's notation; None if the script's own
            configuration gives the layers.
        pattern: the layer pattern of a hybrid model; a pattern without `|` is divided by Megatron-LM.
    """

    def __init__(self, placement: Placement, layout: str | None = None, pattern: HybridPattern | None = None) -> None:
        self._placement, self._layout = placement, layout
        self._pattern = pattern if pattern is not None and pattern.is_divided else None
        self.is_v = placement.kind == "v"
        self._running: int | None = None
        """In a V placement, the index of the stage whose forward step runs now; None outside of forward steps."""

    def set_embedding_ranks(self, call: Call) -> None:
        """In a V placement, pass `initialize_model_parallel` a function that returns an embedding group's ranks."""
        if self.is_v:
            call["get_embedding_ranks"] = embedding_ranks(self._placement)

    def configure_new(self, call: Call) -> None:
        """When `TransformerConfig.__post_init__` is called, set the layout in the new configuration."""
        config = call["self"]
        if self._layout is not None and self._is_to_place(config):
            # The layout already includes the effect of these settings.
            config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
            config.account_for_embedding_in_pipeline_split = config.account_for_loss_in_pipeline_split = False
            config.pipeline_model_parallel_layout = self._layout
        call.proceed()
        self.configure(config)

    def configure_old(self, call: Call) -> Any:
        """When a function reads the layout of a configuration that has no layout yet, set the layout first."""
        self.configure(call["config"])
        return call.proceed()

    def configure(self, config: Any) -> None:
        """Give `config` the layout if `config` lacks the layout and has the placement's number of pipeline ranks."""
        if self._layout is not None and self._is_to_place(config):
            rank = parallel_state.get_pipeline_model_parallel_rank()
            config.pipeline_model_parallel_layout = PlacedLayout(self._layout, self._placement, rank)

    def _is_to_place(self, config: Any) -> bool:
        is_placed = isinstance(config.pipeline_model_parallel_layout, PlacedLayout)
        return config.pipeline_model_parallel_size == self._placement.num_ranks and not is_placed

    def place(self, call: Call) -> None:
        """Set a model constructor's arguments so that the chunk gets the layers, embedding and loss of its stage."""
        config, chunk = call["config"], call.get("vp_stage")
        self.configure(config)
        if self._pattern is not None:
            call["hybrid_layer_pattern"], call["hybrid_override_pattern"] = str(self._pattern), None
            config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
        if self.is_v:
            assert chunk is not None, "the script builds two chunks a rank: checked at its start"
            stage = self._stage_of(chunk)
            call["pre_process"], call["post_process"] = stage == 0, stage == self._placement.num_stages - 1
            rank = parallel_state.get_pipeline_model_parallel_rank()
            call["pg_collection"] = chunk_groups(self._placement, rank, chunk)

    def placed_provider(self, provider: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """In a V placement, wrap the script's `model_provider`, so that it learns whether a chunk is an end of the V.

        Megatron-LM passes `pre_process` and `post_process` of its own placement, and a script may add a head where
        `post_process` is set.
        """
        if provider is None or not self.is_v:
            return provider

        @wraps(provider)
        def placed_model_provider(*arguments: Any, **options: Any) -> Any:
            if (chunk := options.get("vp_stage")) is not None:
                stage = self._stage_of(chunk)
                ends = {"pre_process": stage == 0, "post_process": stage == self._placement.num_stages - 1}
                options.update({name: value for name, value in ends.items() if name in options})
            return provider(*arguments, **options)

        return placed_model_provider

    def finish(self, built: Sequence[Any]) -> None:
        """Copy the weights that the first and the last stage of a V placement share, once all chunks are built."""
        num_chunks = self._placement.num_chunks
        if self.is_v and len(built) % num_chunks == 0:
            copy_tied_embedding(built[-num_chunks:])

    def select(self, call: Call) -> Any:
        """Return a chunk's layer symbols and the number of layers before the chunk, like `select_pipeline_segment`."""
        if self._pattern is None:
            return call.proceed()
        stage = self._stage_of(call["vp_stage"] or 0)
        return list(self._pattern.stages[stage]), sum(self._pattern.partition[:stage])

    def _stage_of(self, chunk: int) -> int:
        return self._placement.stage_of(parallel_state.get_pipeline_model_parallel_rank(), chunk)

    def is_stage(self, call: Call, stage: int) -> bool:
        """Return whether the current stage is `stage`; -1 stands for the last stage.

        In a V placement, the current stage is the stage whose forward step runs. If no forward step runs, the current
        stage is the stage of the chunk `vp_stage`. In a placement other than a V placement, `is_stage` returns the
        result of megatron-core's own function. `is_stage` also returns megatron-core's result if no forward step runs
        and `vp_stage` is None or `ignore_virtual` is set.
        """
        stage %= self._placement.num_stages
        if self._running is not None:
            return self._running == stage
        if not self.is_v or call["ignore_virtual"] or call["vp_stage"] is None:
            return call.proceed()
        return self._stage_of(call["vp_stage"]) == stage

    def placed(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """In a V placement, wrap the script's forward step, so that `is_stage` knows the stage whose forward runs."""

        def placed_forward_step(data_iterator: Any, model: torch.nn.Module, *more: Any, **options: Any) -> Any:
            self._running = self._stage_of(get_attr_wrapped_model(model, "vp_stage"))
            try:
                return forward_step(data_iterator, model, *more, **options)
            finally:
                self._running = None

        return placed_forward_step if self.is_v else forward_step

    def to_last_rank(self, losses: list[Any]) -> list[Any]:
        """In a V placement, copy the loss function's results to the last rank, which logs losses; a collective call.

        The last rank also gets the losses of multi-token prediction, which megatron-core sums in a global variable.

        Args:
            losses: one entry of tensors and plain values for each microbatch; only the entries on the last stage's rank
                are read.
        """
        if not self.is_v:
            return losses
        group = parallel_state.get_pipeline_model_parallel_group()
        holder = self._placement.rank_of(self._placement.num_stages - 1)
        # Tensors move to the host first: pickling keeps a tensor's device, which differs between ranks.
        results = _moved((losses, tracked_sums()), "cpu") if group.rank() == holder else None
        objects: list[Any] = [results]
        dist.broadcast_object_list(objects, src=dist.get_global_rank(group, holder), group=group)
        if group.rank() == group.size() - 1:
            losses, further = _moved(objects[0], torch.cuda.current_device())
            if further:
                track(further)
        return losses


def _moved(value: Any, device: Any) -> Any:
    """Return a copy of nested lists, tuples and dictionaries with all tensors on `device`."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
