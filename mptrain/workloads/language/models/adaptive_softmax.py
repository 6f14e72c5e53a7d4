"""A last layer whose rare tokens stand in clusters behind one entry each (Grave et al. 2017).

The logarithms of probabilities are FP32 whatever the layer's dtype: torch's own layer keeps them in that of its input,
where FP16 says of a token with a probability of 1/e^16 no more than to the nearest hundredth, and sums up in half.
Training waits for the device once a step, to learn how many tokens of the batch stand in each cluster.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mptrain.workloads.language.models.exact_softmax import exact


class AdaptiveSoftmax(nn.Module):
    """A softmax over the frequent tokens and the clusters, and one within each cluster.

    Cluster i, counted from 1, has rows of F / shrink^i numbers, so rare tokens cost little memory and, since only those
    places of a batch are looked at whose token stands in the cluster, little time. The vocabulary must be sorted by
    frequency. The same function as `torch.nn.AdaptiveLogSoftmaxWithLoss` with ``div_value=shrink``.

    Args:
        features: Numbers of a place, F.
        vocabulary_size: How many tokens there are, V.
        cutoffs: Where clusters begin, rising, above 0 and below V.
        shrink: By how much rows become shorter from cluster to cluster.

    Attributes:
        bounds: Where clusters begin and end: ``cutoffs`` and V.
    """

    def __init__(self, features: int, vocabulary_size: int, cutoffs: tuple[int, ...], shrink: float) -> None:
        super().__init__()
        self.bounds = (*cutoffs, vocabulary_size)
        self.head = nn.Linear(features, cutoffs[0] + len(cutoffs), bias=False)
        self.tails = nn.ModuleList()
        for number, (begin, end) in enumerate(itertools.pairwise(self.bounds), start=1):
            width = max(1, int(features // shrink**number))
            narrow, wide = nn.Linear(features, width, bias=False), nn.Linear(width, end - begin, bias=False)
            self.tails.append(nn.Sequential(narrow, wide))

    def forward(self, given: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """Logarithms of the probabilities of all tokens, or what targets cost.

        Args:
            given: ``[N, T, F]``.
            targets: Token numbers, int64 ``[N, T]``.

        Returns:
            Without targets: float32 ``[N, T, V]``. With them: the losses of the targets, float32 ``[N, T]``, and the best
            guesses, int64 ``[N, T]``, which there are none of in training: None.
        """
        if targets is None:
            return self._logarithms(given)
        rows, right = given.flatten(0, 1), targets.flatten()
        if self.training:
            return self._losses(rows, right).view_as(targets), None
        losses, best = exact(rows, right, self._logarithms, self.bounds[-1])
        return losses.view_as(targets), best.view_as(targets)

    def _logarithms(self, given: Tensor) -> Tensor:
        head = F.log_softmax(self.head(given).float(), -1)
        frequent = self.bounds[0]
        parts = [head[..., :frequent]]
        for number, tail in enumerate(self.tails):
            entry = head[..., frequent + number, None]
            parts.append(entry + F.log_softmax(tail(given).float(), -1))
        return torch.cat(parts, -1)

    def _losses(self, rows: Tensor, right: Tensor) -> Tensor:
        """Losses float32 ``[R]``: each place asks the head, and its own cluster alone."""
        frequent = self.bounds[0]
        cluster = torch.stack([right >= begin for begin in self.bounds[:-1]]).sum(0)
        entry = torch.where(cluster == 0, right, frequent - 1 + cluster)
        losses = F.cross_entropy(self.head(rows).float(), entry, reduction="none")
        order = torch.argsort(cluster, stable=True)
        counts = torch.bincount(cluster, minlength=len(self.bounds)).tolist()  # the one wait of a step
        pieces = [torch.zeros(counts[0], device=rows.device)]
        for places, begin, tail in zip(order.split(counts)[1:], self.bounds, self.tails, strict=False):
            # Of no places the layers are asked all the same: every parameter has a gradient in every step.
            scores = tail(rows.index_select(0, places)).float()
            pieces.append(F.cross_entropy(scores, right[places] - begin, reduction="none"))
        return losses.index_add(0, order, torch.cat(pieces))
