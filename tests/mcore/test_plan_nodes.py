"""Schedule plans that are completed to compute the numbers of a model's forward."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel.utils import ScheduleNode

from megatron.zero_bubble.mcore.plan_nodes import complete_plan

CONFIG = SimpleNamespace(sequence_parallel=False, num_moe_experts=4, expert_model_parallel_size=2)


class Plan:
    """A plan of one layer."""

    def __init__(self, **nodes):
        self._layer = SimpleNamespace(layer=torch.nn.Linear(1, 1), mlp=None, moe_combine=None, **nodes)

    def num_layers(self):
        return 1

    def get_layer(self, number):
        return self._layer


def model():
    built = torch.nn.Module()
    built.config = CONFIG
    built.decoder = torch.nn.Module()
    built.decoder.layers = [None]
    built.decoder.final_layernorm = None
    return built


@pytest.mark.parametrize("name", ["attn", "pre_dispatch_computation"])
def test_hooks_of_a_layer_run_before_its_first_node(name):
    calls = []
    node = ScheduleNode.__new__(ScheduleNode)
    node.forward_func = lambda value: calls.append("node") or value
    plan = Plan(**{name: node})
    plan.get_layer(0).layer.register_forward_pre_hook(lambda *_: calls.append("hook"))
    complete_plan(model(), plan)
    assert node.forward_func(3) == 3
    assert calls == ["hook", "node"]


def test_a_plan_whose_layers_begin_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr("megatron.core.__version__", "0.30.0")
    with pytest.raises(
        ValueError, match=r"^--overlap-moe-expert-parallel-comm does not work .* 0\.30\.0 .*: use 0\.16"
    ):
        complete_plan(model(), Plan(attention=None))
