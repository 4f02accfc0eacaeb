"""The arguments that a script gives to DDP: the layout of a chunk's parameters, and DDP's configuration."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from megatron.zero_bubble.launcher.ddp_arguments import construct_ddp, defer_in_ddp, shard_before_layout
from megatron.zero_bubble.launcher.hooks import Call


def compute_full_param_layout(params: Sequence[torch.nn.Parameter], bucket_size: int) -> tuple[list[int], int]:
    """Stand in for megatron-core's function: return the sizes of the parameters."""
    return [parameter.numel() for parameter in params], bucket_size


def call_for(parameters: Sequence[torch.nn.Parameter]) -> Call:
    return Call(compute_full_param_layout, inspect.signature(compute_full_param_layout).bind(parameters, 7))


@pytest.mark.parametrize("trained", [[], [torch.nn.Linear(3, 3)]], ids=["frozen", "trained"])
def test_the_parameters_after_sharding_are_laid_out(trained: list[torch.nn.Module]) -> None:
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), *trained)
    chunks = [torch.nn.Linear(5, 5), chunk]
    before = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
    call = call_for(before)
    shard_before_layout(call, chunks, lambda: chunk.register_parameter("shard", torch.nn.Parameter(torch.ones(6))))
    assert call.proceed() == ([6, *(parameter.numel() for parameter in before)], 7)


def test_another_models_parameters_are_laid_out_as_they_are() -> None:
    other, call = torch.nn.Linear(2, 2), call_for(list(torch.nn.Linear(2, 3).parameters()))
    shard_before_layout(call, [other], lambda: pytest.fail("sharded"))
    assert call.proceed() == ([6, 3], 7)


@dataclass
class Configuration:
    """Stand in for the configuration of DDP, which has `num_buckets` from megatron-core 0.18 on."""

    num_buckets: int
    bucket_size: int | None = None
    delay_wgrad_compute: bool = False
    align_param_gather: bool = True

    def __post_init__(self) -> None:
        assert self.bucket_size is None, "Cannot specify both num_buckets and bucket_size"


def test_a_bucket_size_that_follows_from_a_number_of_buckets_is_kept() -> None:
    """Megatron-LM computes it from `--ddp-num-buckets`."""
    config = Configuration(num_buckets=5)
    config.bucket_size = 1000
    call = Call(lambda ddp_config: ddp_config, inspect.signature(lambda ddp_config: None).bind(config))
    defer_in_ddp(call)
    changed = {"delay_wgrad_compute": True, "align_param_gather": False}
    assert vars(call.proceed()) == {"num_buckets": 5, "bucket_size": 1000, **changed}
    assert not config.delay_wgrad_compute


def test_a_script_constructs_ddp_on_the_stream_of_w(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM has entered a stream of its own; a bucket's reduction waits only for the stream of its last hook."""
    streams = []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default stream of {device}")

    @contextlib.contextmanager
    def stream(given: str | None) -> Iterator[None]:
        streams.append(given)
        yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    for devices in (["cuda:0"], ["cpu"], []):
        parameters = [mock.Mock(device=torch.device(device)) for device in devices]
        module = mock.Mock(parameters=lambda: iter(parameters))  # noqa: B023
        constructed = mock.Mock()
        signature = inspect.signature(lambda ddp_config, module: None)
        construct_ddp(Call(constructed, signature.bind(Configuration(num_buckets=1), module)))
        constructed.assert_called_once()
    assert streams == ["default stream of cuda:0", None, None]
