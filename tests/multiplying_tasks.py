"""Tasks whose losses multiply matrices, in FP32 or in the dtype of the features, and models with products of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from mptrain.workloads.classification.task import Classify


def contrastive(features, targets):
    unit = F.normalize(features, dim=1)
    return F.cross_entropy((unit @ unit.T / 0.1).fill_diagonal_(-1e4), targets)


def gram(features, targets):
    maps = features.unflatten(1, (2, -1))
    return (maps @ maps.transpose(1, 2) / maps.shape[2]).square().mean() + F.cross_entropy(features, targets)


def sinkhorn(features, targets):
    cost = torch.cdist(features, features.detach().roll(1, 0))
    kernel, left = torch.exp(-cost), torch.full_like(features[:, 0], 1 / len(features))
    right = left
    for _ in range(3):
        left = 1 / (len(features) * (kernel @ right))
        right = 1 / (len(features) * (kernel.T @ left))
    return (left[:, None] * kernel * right * cost).sum() + F.cross_entropy(features, targets)


def cdist(features, targets):
    return F.cross_entropy(-torch.cdist(features, torch.eye(features.shape[1])), targets)


def crf(features, targets):
    """The forward algorithm of a linear chain over the batch, with products of probabilities."""
    transitions = torch.ones(features.shape[1], features.shape[1]).softmax(1)
    alpha = features[:1].softmax(1)
    for row in features[1:4]:
        alpha = (alpha @ transitions) * row.softmax(0)
    return F.cross_entropy(features, targets) - alpha.sum().log()


def metric_learning(features, targets):
    square = features.square().sum(1)
    distances = square[:, None] + square - 2 * torch.mm(features, features.t())
    same = targets[:, None] == targets
    return (distances * same).mean() + F.relu(1 - distances * ~same).mean()


def einsum(features, targets):
    return torch.einsum("ij,kj->ik", features, features).square().mean().sqrt() + F.cross_entropy(features, targets)


def log_determinant(features, targets):
    covariance = features.T @ features / len(features) + torch.eye(features.shape[1])
    return F.cross_entropy(features, targets) - 0.01 * torch.logdet(torch.linalg.cholesky(covariance))


LOSSES = {
    one.__name__: one for one in (contrastive, gram, sinkhorn, cdist, crf, metric_learning, einsum, log_determinant)
}


@dataclass(frozen=True)
class Multiplies(Classify):
    """Classification with one of `LOSSES`, computed from FP32 features without autocast, or as autocast has it."""

    kind: str = "contrastive"
    wide: bool = True

    def loss(self, model, batch):
        features = model(batch.inputs)
        with torch.autocast(features.device.type, enabled=not self.wide and torch.is_autocast_enabled("cpu")):
            return LOSSES[self.kind](features.float(), batch.targets).float()


class Attention(nn.Module):
    """Attention without parameters over the rows of an image."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, given):
        if self.own:
            return (given @ given.transpose(1, 2) / 8**0.5).float().softmax(2).to(given.dtype) @ given
        return F.scaled_dot_product_attention(given, given, given)


class Whiten(nn.Module):
    """Whitens features by the Cholesky factor of their covariance; torch has none of it in half precision."""

    def forward(self, given):
        centred = given - given.mean(0)
        covariance = centred.T @ centred / len(given) + 0.1 * torch.eye(given.shape[1], dtype=given.dtype)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), centred.T, upper=False).T


MIDDLES = {
    "none": nn.Identity,
    "attention": lambda: nn.Sequential(nn.Unflatten(1, (4, 4)), Attention(own=True), nn.Flatten()),
    "fused_attention": lambda: nn.Sequential(nn.Unflatten(1, (4, 4)), Attention(own=False), nn.Flatten()),
    "whiten": Whiten,
}


def network(*, num_classes: int, in_channels: int, image_size: int, middle: str = "none") -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * image_size**2, 16),
        nn.Tanh(),
        MIDDLES[middle](),
        nn.Linear(16, num_classes),
    )
