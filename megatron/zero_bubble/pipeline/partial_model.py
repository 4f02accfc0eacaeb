"""A model whose layers are distributed over the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from megatron.zero_bubble.pipeline.forward_state import memory_of
from megatron.zero_bubble.pipeline.gradients import LayerNorm, TiedLayer, own_norms, unsharded
from megatron.zero_bubble.pipeline.held_layers import HeldLayers
from megatron.zero_bubble.pipeline.interconnect import Agreement
from megatron.zero_bubble.pipeline.messages import clone_tensors
from megatron.zero_bubble.runtime.joint import from_all_ranks


class PartialModel(nn.Module):
    """A module that holds this rank's layers under their names in a `torch.nn.Sequential` of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self._agreement: Agreement
        # In a tuple, so that the module does not register the parameter.
        self._placeholder = (("placeholder", nn.Parameter(torch.empty(0, 0))),)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the pipeline runs the layers that it was built with, so none of them can be replaced."""
        if isinstance(value, nn.Module) and self.__dict__.get("_modules", {}).get(name, value) is not value:
            raise ValueError(
                f"layer {name} cannot be replaced by {type(value).__name__}: replace modules inside the layer, or make "
                "a new Pipeline"
            )
        super().__setattr__(name, value)

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters of this rank's layers.

        If the layers have no parameters, yield one empty parameter, because an optimizer needs at least one parameter.
        """
        yield from tuple(super().named_parameters(*arguments, **options)) or self._placeholder

    def own_named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank's layers by name."""
        return dict(super().named_parameters())

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's layers."""
        return list(self.own_named_parameters().values())

    def gradient_norms(self, norm_type: float = 2.0) -> list[LayerNorm]:
        """Return the norms of this rank's gradients; parameters with a copy on an earlier stage are left out."""
        copies = {parameter for tied in self._tied for parameter in tied.parameters_beyond_first()}
        parameters = self.own_named_parameters().items()
        return own_norms([(layer_of(name), each) for name, each in parameters if each not in copies], norm_type)

    def _hold(self, held: HeldLayers, tied: Sequence[TiedLayer], keys: Sequence[str | None]) -> None:
        """Register the layers of this rank.

        Args:
            keys: for each layer of the model, the key of the tied layer, or None.
        """
        for layer in held.layers:
            self.add_module(str(layer.index), layer.module)
        self._tied, self._keys = tied, keys

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model in host memory on every rank; `torch.nn.Sequential` can load the state.

        For large models, save `state_dict()` with `torch.distributed.checkpoint`, so that every rank writes and reads
        only the state of its own layers. The names in `state_dict()` depend neither on the partition nor on the number
        of ranks.
        """
        state = {
            name: unsharded(value).cpu() if isinstance(value, torch.Tensor) else value
            for name, value in self.state_dict().items()
        }
        whole = {name: value for part in self._agreement.gather(state) for name, value in part.items()}
        return dict(sorted(whole.items(), key=lambda entry: layer_of(entry[0])))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's layers from `state_dict`, which may contain layers of other ranks as well.

        As with a module that occurs several times in `torch.nn.Sequential`, a tied parameter gets the last value that
        `state_dict` has for a layer with the same key.
        """
        elsewhere = set(map(str, range(len(self._keys)))) - set(self._modules)  # layers may share a module
        state = {name: value for name, value in state_dict.items() if name.partition(".")[0] not in elsewhere}
        for name in super().state_dict():
            key = self._keys[layer_of(name)]
            for layer in (layer for layer, other in enumerate(self._keys) if other == key is not None):
                same = f"{layer}.{name.partition('.')[2]}"
                if same in state_dict:  # cloned, because with `assign` two copies on this rank would share memory
                    state[name] = state_dict[same] if same == name else clone_tensors(state_dict[same])
        return super().load_state_dict(state, strict, assign)

    def _copy_first(self, replicas: dist.ProcessGroup) -> None:
        """Copy the values of all parameters and buffers of this rank from the first replica to all replicas.

        Raises:
            ValueError: on all ranks, if the ranks of some stage's group `replicas` do not hold the same parameters.
        """
        self._agreement.together(lambda: self._check_replicas(replicas))
        for tensor in (*self.own_parameters(), *self.buffers()):
            memory = memory_of(tensor.detach())
            values = torch.empty(memory.shape, dtype=memory.dtype, device=memory.device).copy_(memory)
            # As bytes, because gloo does not send all types.
            dist.broadcast(values.view(-1).view(torch.uint8), dist.get_process_group_ranks(replicas)[0], group=replicas)
            memory.copy_(values)

    def _check_replicas(self, replicas: dist.ProcessGroup) -> None:
        state = {**self.own_named_parameters(), **dict(self.named_buffers())}
        own = [f"{name} ({list(each.shape)}, {each.dtype}, {each.requires_grad})" for name, each in state.items()]
        first, *others = from_all_ranks(own, replicas)
        for rank, other in zip(dist.get_process_group_ranks(replicas)[1:], others, strict=True):
            for ours, theirs in zip_longest(first, other, fillvalue="no further tensor"):
                if ours != theirs:
                    raise ValueError(
                        "replicas must be a group of ranks with the same stages, one rank of each replica; its first "
                        f"rank has {ours}, rank {rank} has {theirs}"
                    )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a Pipeline can be neither copied nor pickled, because it holds connections to other ranks: save and load "
            "state_dict(), or average the tensors of parameters(), for example with "
            "torch.optim.swa_utils.get_ema_multi_avg_fn()"
        )

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError("a Pipeline runs whole steps: call train_batch or eval_batch")


def layer_of(name: str) -> int:
    """Return the index of the layer to which the parameter or buffer `name` belongs."""
    return int(name.partition(".")[0])
