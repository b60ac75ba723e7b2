"""Shared by the examples: tiny data, and a small network that was trained on it without CE."""

import timm
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

SIZE = 16
TRAINING = 128  # images, so that an example takes seconds


def images_and_labels() -> tuple[Tensor, Tensor]:
    """Images of scikit-learn's digits, (N, 3, 16, 16), and their classes."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:TRAINING, None] / 16
    images = interpolate((images - 0.5) / 0.5, size=(SIZE, SIZE), mode="bilinear")
    return images.repeat(1, 3, 1, 1), torch.tensor(digits.target[:TRAINING])


def trained_network() -> nn.Module:
    """A small ResNet of timm after a few steps; in your own code, use `pretrained=True` instead."""
    torch.manual_seed(0)
    network: nn.Module = timm.create_model("test_resnet", num_classes=10)
    images, labels = images_and_labels()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        for some, classes in zip(images.split(64), labels.split(64), strict=True):
            optimizer.zero_grad()
            cross_entropy(network(some), classes).backward()
            optimizer.step()
    return network
