"""A mistake in arguments, batches or calls of a pipeline ends in one line on all ranks; no rank waits for another."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from rank_threads import errors_on_ranks, pipeline_of, pipelines
from refused_pipelines import X, Y, assert_message, linears
from torch import nn
from torch.optim.swa_utils import SWALR

from megatron.zero_bubble import LayerSpec, Pipeline, TiedLayerSpec
from megatron.zero_bubble.pipeline.interconnect import connect_ranks
from megatron.zero_bubble.planner import generate

NO_LAYERS = "layers must be a list of layers, each of which takes the previous layer's output, got"


class ScaledLoss(nn.Module):
    """A loss with a parameter of its own, which no rank would train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output, target):
        return nn.functional.mse_loss(output * self.scale, target)


@pytest.mark.parametrize(
    ("num_layers", "arguments", "message"),
    [
        (3, {"schedule": "zb-v"}, "3 layers are too few for 4 stages, which schedule zb-v has on 2 ranks"),
        (
            4,
            {"partition": "type:Conv"},
            "partition='type:Conv' matches no layer; their classes are Linear",
        ),
        (
            4,
            {"partition": "evenly"},
            "partition='evenly' is unknown: use 'uniform', 'parameters', 'type:REGEX', 'profile' or a list of "
            "boundaries",
        ),
        (
            4,
            {"partition": "profile"},
            "partition='profile' needs example=(inputs, targets), one microbatch to measure layers with",
        ),
        (
            4,
            {"partition": [4]},
            "partition=[4]: 4 layers on 2 stages need 1 rising boundaries from 1 to 3, the first layer of every stage "
            "after the first",
        ),
        (
            4,
            {"schedule": "zb-1p", "memory_limit": 0.1},
            "on rank 0 schedule zb-1p needs 2 of memory, above the limit of 0.1; 2 is enough for every rank",
        ),
        (4, {"schedule": generate("zb-h1", 3, 4)}, "schedule zb-h1 is for 3 ranks, but the pipeline has 2"),
        (
            4,
            {"schedule": generate("zb-h1", 2, 6)},
            "schedule zb-h1 is for 6 microbatches, not for 4",
        ),
        (
            4,
            {"schedule": "1f1b", "memory_limit": 1, "offload": 1.0},
            "offload needs a planned schedule, and 1f1b is not planned: use schedule='auto'",
        ),
        (4, {"batch": (X[:6], Y[:6])}, "a batch of 6 samples does not divide into 4 microbatches"),
        (
            4,
            {"batch": (X, Y[:4])},
            "the tensors of a batch have 4 and 8 samples: give equal numbers, or an iterator of microbatches",
        ),
        (4, {"schedule": None}, "schedule must be a name or a Schedule, got None"),
        (4, {"loss_fn": "mse"}, "loss_fn must be a function of output and target, got 'mse'"),
        (4, {"partition": None}, "partition=None is not a name or a list of whole numbers"),
        (4, {"partition": ["1"]}, "partition=['1'] is not a name or a list of whole numbers"),
        (4, {"partition": [True]}, "partition=[True] is not a name or a list of whole numbers"),
        (4, {"example": torch.ones(3, 1)}, "example=tensor([[1.], [1.], [1.]]) is not a pair (inputs, targets)"),
        (4, {"num_chunks": "2"}, "num_chunks='2' is not a whole number"),
        (4, {"partition": {1}}, "partition={1} is not a name or a list of whole numbers"),
        (4, {"memory_limit": {1, 2}}, "memory_limit={1, 2} is not a number, or a number per rank"),
        (4, {"memory_limit": torch.tensor(1.0)}, "memory_limit=tensor(1.) is not a number, or a number per rank"),
        (4, {"memory_limit": [1, "2"]}, "memory_limit=[1, '2'] is not a number, or a number per rank"),
        (4, {"offload": "1"}, "offload='1' is not a number"),
        (4, {"split_layers": None}, "split_layers=None is not a list of classes of modules"),
        (4, {"split_layers": ["Linear"]}, "split_layers=['Linear'] is not a list of classes of modules"),
        (4, {"split_layers": {nn.Linear}}, f"split_layers={ {nn.Linear} } is not a list of classes of modules"),
        (4, {"checkpoint": "x"}, "checkpoint='x' is not True or False"),
        (4, {"post_validation": "yes"}, "post_validation='yes' is not True or False"),
        (4, {"batch": [(X, Y)] * 3}, "the iterator ended after 3 of 4 microbatches"),
        (4, {"batch": [{"x": X}] * 4}, "microbatch 0 of the iterator is a dict, not a pair (inputs, targets)"),
        (
            4,
            {"batch": X},
            "a batch is a pair (inputs, targets), or an iterator of such pairs, got Tensor",
        ),
        (
            4,
            {"batch": range(4)},
            "a batch is a pair (inputs, targets), or an iterator of such pairs, got range: give iter(...) of it",
        ),
        (
            4,
            {"batch": ((X, torch.tensor(2.0)), Y)},
            "a tensor of the batch has no dimension to split: give a number, or an iterator of microbatches",
        ),
        (
            4,
            {"batch": [(X, Y), (X, Y), ((X,), Y), (X, Y)]},
            "the inputs of microbatch 2 are (float32[8, 4],), those of microbatch 0 are float32[8, 4]: all "
            "microbatches of a step need the same structure and types",
        ),
        (
            4,
            {"loss_fn": lambda output, target: output - target},
            "loss_fn must return a tensor with one number, got a tensor of shape [2, 4]",
        ),
        (
            4,
            {"loss_fn": lambda output, target: 1j * output.sum()},
            "loss_fn must return a real number, got a complex number",
        ),
        (
            4,
            {"loss_fn": lambda output, target: output.detach().sum()},
            "the loss depends on no parameter that requires a gradient",
        ),
        (
            4,
            {"loss_fn": ScaledLoss()},
            "loss_fn uses a parameter of no layer of stage 1, the last: make the parameter and the part of the loss "
            "that uses it a layer",
        ),
    ],
)
def test_arguments_and_batches(num_layers, arguments, message):
    assert_message(linears(num_layers), message, **arguments)


@pytest.mark.parametrize("count", [4.0, 0, "4", True])
def test_the_number_of_microbatches_is_a_whole_number(count):
    message = f"num_microbatches must be a whole number of at least 1, got {count!r}"
    assert_message(linears(4), message, num_microbatches=count)


@pytest.mark.parametrize(
    ("layers", "arguments", "message"),
    [
        (lambda rank: linears(4 + rank), lambda rank: {}, "layers: rank 0 has 4, rank 1 has 5"),
        (
            lambda rank: [*linears(3), nn.Linear(4, 4, bias=rank == 0)],
            lambda rank: {},
            "layers: layer 3 is Linear(4x4, 4) on rank 0 and Linear(4x4) on rank 1",
        ),
        (
            lambda rank: [TiedLayerSpec("ab"[rank], nn.Linear, 4, 4), *linears(3)],
            lambda rank: {},
            "layers: layer 0 is Linear tied as 'a' on rank 0 and Linear tied as 'b' on rank 1",
        ),
        (
            lambda rank: [LayerSpec(nn.Linear, 4, 4, checkpoint=rank == 0), *linears(3)],
            lambda rank: {},
            "layers: layer 0 is Linear with checkpoint=True on rank 0 and Linear on rank 1",
        ),
        (
            lambda rank: linears(4),
            lambda rank: {"schedule": ("zb-h1", "1f1b")[rank]},
            "schedule: rank 0 has 'zb-h1', rank 1 has '1f1b'",
        ),
        (
            lambda rank: linears(4),
            lambda rank: {"num_microbatches": 4 + 4 * rank},
            "num_microbatches: rank 0 has 4, rank 1 has 8",
        ),
    ],
)
def test_ranks_that_were_given_different_arguments_are_refused(layers, arguments, message):
    def run(interconnect):
        given = {"schedule": "zb-h1", "num_microbatches": 4, **arguments(interconnect.rank)}
        pipeline_of(layers(interconnect.rank), nn.functional.mse_loss, interconnect, **given)

    assert {str(error) for error in errors_on_ranks(2, run)} == {f"all ranks of a pipeline need the same {message}"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerSpec(nn.Linear, 8), "LayerSpec(Linear, ...): missing a required argument: 'out_features'"),
        (lambda: LayerSpec(nn.Linear(4, 4)), "LayerSpec takes a class and its arguments, got Linear"),
        (lambda: TiedLayerSpec(None, nn.Linear, 4, 4), "the key of a TiedLayerSpec must be a string, got None"),
        (lambda: Pipeline(7, print), f"{NO_LAYERS} 7"),
        (lambda: Pipeline(nn.Linear(4, 4), print), f"{NO_LAYERS} a Linear"),
        (lambda: Pipeline([], print, options={}), "options must be PipelineOptions(...), got {}"),
    ],
)
def test_specs_and_pipelines_name_an_argument_of_another_type(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


@pytest.mark.parametrize(
    ("arguments_of", "message"),
    [
        (
            lambda pipeline: (torch.optim.LBFGS(pipeline.parameters()),),
            "train_step cannot use LBFGS, whose step needs a closure: choose an optimizer whose step() needs no "
            "arguments",
        ),
        (lambda pipeline: (None,), "optimizer=None is not an optimizer"),
        (lambda pipeline: (SWALR,), f"optimizer={SWALR} is not an optimizer"),
        (
            lambda pipeline: (torch.optim.SGD(pipeline.parameters()), None),
            "max_norm=None is not a number: leave it out for steps without clipping",
        ),
    ],
)
def test_a_step_with_wrong_arguments_is_refused(arguments_of, message):
    def run(interconnect):
        pipeline = pipeline_of(linears(2), nn.functional.mse_loss, interconnect, schedule="zb-h1", num_microbatches=4)
        pipeline.train_step((X, Y), *arguments_of(pipeline))

    assert [str(error) for error in errors_on_ranks(2, run)] == [message] * 2


@pytest.mark.parametrize("post_validation", [False, True])
def test_an_iterator_that_fails_on_one_rank_ends_all_ranks(post_validation):
    def pairs(samples):
        for sample in samples:
            yield X[:2] * sample["x"], Y[:2]

    def run(interconnect):
        arguments = {"schedule": "zb-h1", "num_microbatches": 4, "post_validation": post_validation}
        pipeline = pipeline_of(linears(2), nn.functional.mse_loss, interconnect, **arguments)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        samples = [{"x": 1}] * 4
        pipeline.train_step(pairs(samples), optimizer)
        pipeline.train_step(pairs([*samples[:2], {}] if interconnect.rank == 0 else samples), optimizer)
        pipeline.settle()

    errors = errors_on_ranks(2, run)
    assert [str(error) for error in errors] == ["the iterator failed at microbatch 2: KeyError: 'x'"] * 2
    assert isinstance(errors[0].__cause__, KeyError) or post_validation


@pytest.mark.parametrize("use", ["train_batch", "full_state_dict", "clip_grad_norm_"])
def test_a_closed_pipeline_is_not_used(use):
    def close_first(interconnect):
        pipeline = pipeline_of(linears(2), nn.functional.mse_loss, interconnect, schedule="zb-h1")
        pipeline.close()
        assert list(pipeline.state_dict())
        getattr(pipeline, use)(*{"train_batch": [(X, Y)], "clip_grad_norm_": [1.0]}.get(use, []))

    message = "the pipeline is closed: make another one, or call close() later"
    assert [str(error) for error in errors_on_ranks(2, close_first)] == [message] * 2


def test_a_gpu_other_than_the_current_one_is_refused(monkeypatch):
    """A pipeline waits for and records on the current stream, which is a stream of the current GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert connect_ranks(device="cuda:0").device == torch.device("cuda:0")
        with pytest.raises(
            ValueError, match=r"^device='cuda:1' is not .*, cuda:0, .*: call torch\.cuda\.set_device\(1\) first$"
        ):
            connect_ranks(device="cuda:1")
    finally:
        dist.destroy_process_group()


def test_training_in_inference_mode_is_refused():
    def run(interconnect):
        arguments = {"schedule": "zb-h1", "num_microbatches": 4}
        pipeline = pipeline_of(linears(4), nn.functional.mse_loss, interconnect, **arguments)
        with torch.inference_mode():
            pipeline.eval_batch((X, Y))
            pipeline.train_batch((X, Y))

    message = "torch.inference_mode() allows no gradients: train outside it"
    assert [str(error) for error in errors_on_ranks(2, run)] == [message] * 2


@pytest.mark.parametrize("use", [copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel])
def test_a_pipeline_is_not_copied(use):
    def refused(pipeline):
        with pytest.raises(TypeError, match=r"^a Pipeline can be neither copied nor pickled") as error:
            use(pipeline)
        return str(error.value)

    texts = pipelines(2, linears(2), nn.functional.mse_loss, refused, schedule="zb-h1")
    assert all("torch.optim.swa_utils.get_ema_multi_avg_fn()" in text for text in texts)


def test_a_layer_cannot_be_replaced_after_the_pipeline_is_built():
    """The pipeline would run the old layer. Modules inside a layer can be replaced."""

    def run(interconnect):
        layers = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
        pipeline = pipeline_of(layers, nn.functional.mse_loss, interconnect, schedule="zb-h1", num_microbatches=4)
        name = str(interconnect.rank)
        pipeline.get_submodule(name)[0] = nn.Linear(4, 4, bias=False)
        pipeline.train_batch((X, Y))
        assert len(pipeline.own_parameters()) == 1
        setattr(pipeline, name, pipeline.get_submodule(name))
        setattr(pipeline, name, nn.Linear(4, 4))

    assert [str(error) for error in errors_on_ranks(2, run)] == [
        f"layer {rank} cannot be replaced by Linear: replace modules inside the layer, or make a new Pipeline"
        for rank in range(2)
    ]
