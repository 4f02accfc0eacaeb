"""AlexNet on photographs, split over two ranks in four ways, and compared bit for bit with one process.

    torchrun --nproc-per-node 2 examples/alexnet.py

The idea. A pipeline is as fast as its slowest stage. In AlexNet, most of the work is in the convolutions at the
beginning, and most parameters are in the linear layers at the end. Therefore it matters whether a partition balances
work or parameters.

The demonstration. With each partition, AlexNet trains for some steps to recognise the photograph from which a square
was cut. The photographs come with scikit-image. A table shows, for each partition, the balanced quantity, the computing
time of each stage for a microbatch, and the time of a step.

The test. One process trains the same layers on the same data. The pipeline and the single process must have the same
losses and parameters, bit for bit.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from skimage import data
from torch import nn
from torch.nn.functional import cross_entropy

from megatron.zero_bubble import LayerSpec, Pipeline, PipelineOptions

NUM_STEPS, NUM_MICROBATCHES, BATCH_SIZE, IMAGE_SIZE, MAX_NORM = 4, 4, 16, 224, 1.0

PHOTOGRAPHS = [data.astronaut, data.chelsea, data.coffee, data.rocket, data.hubble_deep_field, data.retina]

LAYERS = [
    LayerSpec(nn.Conv2d, 3, 64, 11, stride=4, padding=2),
    LayerSpec(nn.ReLU, inplace=True),
    LayerSpec(nn.MaxPool2d, 3, stride=2),
    LayerSpec(nn.Conv2d, 64, 192, 5, padding=2),
    LayerSpec(nn.ReLU, inplace=True),
    LayerSpec(nn.MaxPool2d, 3, stride=2),
    LayerSpec(nn.Conv2d, 192, 384, 3, padding=1),
    LayerSpec(nn.ReLU, inplace=True),
    LayerSpec(nn.Conv2d, 384, 256, 3, padding=1),
    LayerSpec(nn.ReLU, inplace=True),
    LayerSpec(nn.Conv2d, 256, 256, 3, padding=1),
    LayerSpec(nn.ReLU, inplace=True),
    LayerSpec(nn.MaxPool2d, 3, stride=2),
    LayerSpec(nn.AdaptiveAvgPool2d, (6, 6)),
    LayerSpec(nn.Flatten),
    LayerSpec(nn.Dropout, 0.0),  # 0.5 in a real training, where ranks draw random numbers of their own
    LayerSpec(nn.Linear, 256 * 6 * 6, 4096),
    LayerSpec(nn.ReLU, inplace=True),
    LayerSpec(nn.Dropout, 0.0),
    LayerSpec(nn.Linear, 4096, 4096),
    LayerSpec(nn.ReLU, inplace=True),
    LayerSpec(nn.Linear, 4096, len(PHOTOGRAPHS)),
]


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut random squares out of the photographs; the squares are the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    photographs = [torch.from_numpy(load()).permute(2, 0, 1) / 127.5 - 1 for load in PHOTOGRAPHS]
    batches = []
    for _ in range(NUM_STEPS):
        labels = torch.randint(len(photographs), (BATCH_SIZE,), generator=generator)
        squares = []
        for photograph in (photographs[label] for label in labels):
            top, left = (int(torch.randint(n - IMAGE_SIZE, (), generator=generator)) for n in photograph.shape[1:])
            squares.append(photograph[:, top : top + IMAGE_SIZE, left : left + IMAGE_SIZE])
        batches.append((torch.stack(squares), labels))
    return batches


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)


def train_pipeline(pipeline: Pipeline, batches: list) -> tuple[list[torch.Tensor], float]:
    """Train on both ranks; return the loss of each step, and the median seconds of a step."""
    optimizer, losses, seconds = make_optimizer(pipeline), [], []
    for batch in batches:
        start = time.perf_counter()
        losses.append(pipeline.train_batch(batch))
        seconds.append(time.perf_counter() - start)
        pipeline.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses, median(seconds[1:])  # the first step also finds the shapes of the messages


def train_in_one_process(model: nn.Sequential, batches: list) -> list[torch.Tensor]:
    """Train in one process under autograd, one microbatch after the other."""
    optimizer, losses = make_optimizer(model), []
    for batch in batches:
        loss_of_step = torch.zeros(())
        for images, labels in zip(*(part.chunk(NUM_MICROBATCHES) for part in batch), strict=True):
            loss = cross_entropy(model(images), labels) / NUM_MICROBATCHES
            loss.backward()
            loss_of_step += loss.detach()
        losses.append(loss_of_step)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # a layer's weights start from this seed and its index, under any partition
    batches, model = make_batches(), nn.Sequential(*(spec.build() for spec in LAYERS))
    example = tuple(part.chunk(NUM_MICROBATCHES)[0] for part in batches[0])
    expected, is_equal = [], True
    rows = [f"{'partition':<17} {'layers':<20} {'balances':<31} {'F+B+W of a microbatch':<23} step"]
    for partition in ("uniform", "parameters", "type:conv|linear", "profile"):
        options = PipelineOptions(partition=partition, example=example)
        pipeline = Pipeline(LAYERS, cross_entropy, "zb-h1", NUM_MICROBATCHES, options)
        if not expected:
            model.load_state_dict(pipeline.full_state_dict())  # the names are those of torch.nn.Sequential
            expected = train_in_one_process(model, batches)
        losses, seconds = train_pipeline(pipeline, batches)
        is_equal &= torch.equal(torch.stack(losses), torch.stack(expected))
        is_equal &= all(torch.equal(value, model.state_dict()[name]) for name, value in pipeline.state_dict().items())
        times = " | ".join(f"{sum(of_stage) * 1000:.0f} ms" for of_stage in pipeline.stage_times(batches[0]))
        loads = " | ".join(f"{load:.3g}" for load in pipeline.layout.loads)
        layers = " | ".join(f"{k[0]} to {k[-1]}" for k in map(pipeline.layout.layers_of, range(2)))
        balances = f"{loads} {pipeline.layout.unit}"
        rows.append(f"{partition:<17} {layers:<20} {balances:<31} {times:<23} {seconds * 1000:.0f} ms")
        pipeline.close()
    equal_ranks = torch.tensor(int(is_equal))
    dist.all_reduce(equal_ranks, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(*rows, sep="\n")
        print("losses", ", ".join(f"{loss:.4f}" for loss in expected))
        print("losses and parameters are", "equal to one process's, bit for bit" if equal_ranks else "DIFFERENT")
    dist.destroy_process_group()
    return 0 if equal_ranks else 1


if __name__ == "__main__":
    sys.exit(main())
