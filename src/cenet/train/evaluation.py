"""Accuracy on the test images."""

import torch
from torch import nn

from cenet.train.data import Encoded, Resident
from cenet.train.inputs import Inputs
from cenet.train.loaders import evaluation_batches
from cenet.train.processes import Processes, total
from cenet.train.recipes import Recipe

TEST_BATCH = 256


@torch.no_grad()
def evaluate(
    network: nn.Module,
    data: Resident | Encoded,
    inputs: Inputs,
    recipe: Recipe,
    processes: Processes,
    *,
    channels_last: bool = False,
    workers: int = 0,
) -> dict[str, float]:
    """Loss, top-1 and top-5 accuracy on test images, over all processes."""
    was_training = network.training
    network.eval()
    device = processes.device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    batches = evaluation_batches(
        data, inputs, size=recipe.image_size, batch=TEST_BATCH, device=device,
        channels_last=channels_last, workers=workers, rank=processes.rank, world=processes.world,
    )  # fmt: skip
    for images, labels in batches:
        logits = network(images).float()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        best = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]
        sums += torch.stack(
            [loss.double(), best[:, 0].sum().double(), best.any(1).sum().double(),
             torch.tensor(float(len(labels)), dtype=torch.float64, device=device)]
        )  # fmt: skip
    network.train(was_training)
    loss_sum, top1, top5, count = total(sums, processes).tolist()
    return {"test_loss": loss_sum / count, "test_top1": top1 / count, "test_top5": top5 / count}
