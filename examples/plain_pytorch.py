"""A pipeline of plain PyTorch layers, trained on two ranks and compared bit for bit with one process.

    torchrun --nproc-per-node 2 examples/plain_pytorch.py

The idea. The backward of a linear layer or a convolution computes two gradients. B computes the gradient of the input,
for which the previous rank waits. W computes the gradient of the weight, for which no rank waits. `Pipeline` splits a
list of layers over the ranks, and splits the backward of each layer into B and W. A schedule runs W at times at which a
rank would otherwise wait. The schedule zb-v gives each of two ranks two stages, placed in a V: the first rank has the
first and the last stage.

The demonstration. Each rank builds only its own layers. Every training step is one call of `train_batch`, which splits
a batch into microbatches and leaves the gradients in `parameter.grad`, for any optimizer of torch but LBFGS.

The test. The same layers in one `torch.nn.Sequential` train on the same data under autograd. The pipeline and the
single process must have the same losses, gradient norms and parameters, bit for bit.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from megatron.zero_bubble import LayerSpec, Pipeline

NUM_STEPS, NUM_MICROBATCHES, MAX_NORM = 10, 8, 1.0

LAYERS = [
    LayerSpec(nn.Conv2d, 1, 16, 3, padding=1),
    LayerSpec(nn.ReLU, inplace=True),
    LayerSpec(nn.MaxPool2d, 2),
    LayerSpec(nn.Conv2d, 16, 32, 3, padding=1),
    LayerSpec(nn.ReLU, inplace=True),
    LayerSpec(nn.MaxPool2d, 2),
    LayerSpec(nn.Flatten),
    LayerSpec(nn.Linear, 32 * 4 * 4, 64),
    LayerSpec(nn.ReLU, inplace=True),
    LayerSpec(nn.LayerNorm, 64),
    LayerSpec(nn.Linear, 64, 4),
]


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make pictures with one bright quarter, which the model has to find; the pictures are the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(64, 1, 16, 16, generator=generator)
    quarters = torch.randint(4, (64,), generator=generator)
    for image, quarter in zip(images, quarters.tolist(), strict=True):
        row, column = divmod(quarter, 2)
        image[0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
    return images, quarters


def train_pipeline(pipeline: Pipeline) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train on all ranks; return the loss and the gradient norm of every step."""
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=3e-3)
    results = []
    for step in range(NUM_STEPS):
        loss = pipeline.train_batch(make_batch(step))
        norm = pipeline.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss, norm))
    return results


def train_in_one_process(model: nn.Sequential) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train in the same way in one process under autograd, one microbatch after the other."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    results = []
    for step in range(NUM_STEPS):
        total = torch.zeros(())
        for images, quarters in zip(*(part.chunk(NUM_MICROBATCHES) for part in make_batch(step)), strict=True):
            loss = cross_entropy(model(images), quarters) / NUM_MICROBATCHES
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        results.append((total, norm))
    return results


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pipeline = Pipeline(LAYERS, cross_entropy, schedule="zb-v", num_microbatches=NUM_MICROBATCHES)
    model = nn.Sequential(*(spec.build() for spec in LAYERS))
    model.load_state_dict(pipeline.full_state_dict())  # the names are those of torch.nn.Sequential

    ours, expected = train_pipeline(pipeline), train_in_one_process(model)
    trained = pipeline.full_state_dict()
    is_equal = torch.equal(torch.tensor(ours), torch.tensor(expected))
    is_equal &= all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    if rank == 0:
        print(pipeline.summary())
        for step, (loss, norm) in enumerate(ours):
            print(f"step {step}: loss {loss:.6f}, norm of the gradients {norm:.6f}")
        print("losses, norms and parameters are", "equal to one process's, bit for bit" if is_equal else "DIFFERENT")
    pipeline.close()
    dist.destroy_process_group()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
