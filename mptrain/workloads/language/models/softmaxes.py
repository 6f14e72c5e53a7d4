"""Output layers of language models with large vocabularies: adaptive softmax, and softmax sampled in training.

Log-probabilities, scores, corrections and the softmax are in FP32 whatever the layer's dtype. So are the random draws,
which are therefore the same in every precision. Vocabularies must be sorted by frequency.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

#: Number of scores held at a time in evaluation: 256 MiB in FP32.
SCORES_AT_A_TIME = 2**26


class LargeSoftmax(nn.Module, ABC):
    """Base class of output layers for large vocabularies of V tokens, whose training computes less than V scores."""

    vocabulary_size: int

    def forward(self, given: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return the scores of all tokens, ``[N, T, V]``, for features ``[N, T, F]``.

        With targets, int64 ``[N, T]``, return their losses in nats, float32, and the best guesses, int64. In training
        the losses are those of `training_losses` and the guesses None.
        """
        if targets is None:
            return self.scores(given)
        rows, right = given.flatten(0, 1), targets.flatten()
        if self.training:
            return self.training_losses(rows, right).view_as(targets), None
        losses, best = exact(rows, right, self.scores, self.vocabulary_size)
        return losses.view_as(targets), best.view_as(targets)

    @abstractmethod
    def scores(self, given: Tensor) -> Tensor:
        """Return scores (logits or log-probabilities), ``[..., V]``, for features ``[..., F]``."""

    @abstractmethod
    def training_losses(self, rows: Tensor, right: Tensor) -> Tensor:
        """Return the losses in nats, float32 ``[R]``, of targets ``[R]`` at rows ``[R, F]``."""


class AdaptiveSoftmax(LargeSoftmax):
    """Softmax over frequent tokens and clusters of rare ones, and a softmax within each cluster (Grave et al. 2017).

    The clusters start at ``cutoffs``, rising, above 0 and below V. Rows of cluster i, counted from 1, have F / shrink^i
    numbers, and a cluster is computed only at positions whose target is in it. The function is that of
    `torch.nn.AdaptiveLogSoftmaxWithLoss` with ``div_value=shrink``. That module keeps logarithms in the dtype of its
    input and sums in half precision; in FP16 the log-probability of a token with probability e^-16 is only accurate to
    a hundredth. Training synchronises with the device once a step, to count the tokens of the batch in each cluster.
    """

    def __init__(self, features: int, vocabulary_size: int, cutoffs: tuple[int, ...], shrink: float) -> None:
        super().__init__()
        self.bounds, self.vocabulary_size = (*cutoffs, vocabulary_size), vocabulary_size
        self.head = nn.Linear(features, cutoffs[0] + len(cutoffs), bias=False)
        self.tails = nn.ModuleList()
        for number, (begin, end) in enumerate(itertools.pairwise(self.bounds), start=1):
            width = max(1, int(features // shrink**number))
            narrow, wide = nn.Linear(features, width, bias=False), nn.Linear(width, end - begin, bias=False)
            self.tails.append(nn.Sequential(narrow, wide))

    def scores(self, given: Tensor) -> Tensor:
        """Return log-probabilities, float32."""
        head = F.log_softmax(self.head(given).float(), -1)
        frequent = self.bounds[0]
        parts = [head[..., :frequent]]
        for number, tail in enumerate(self.tails):
            entry = head[..., frequent + number, None]
            parts.append(entry + F.log_softmax(tail(given).float(), -1))
        return torch.cat(parts, -1)

    def training_losses(self, rows: Tensor, right: Tensor) -> Tensor:
        """Return the losses; each row is evaluated on the head and only on its own cluster."""
        frequent = self.bounds[0]
        cluster = torch.stack([right >= begin for begin in self.bounds[:-1]]).sum(0)
        entry = torch.where(cluster == 0, right, frequent - 1 + cluster)
        losses = F.cross_entropy(self.head(rows).float(), entry, reduction="none")
        order = torch.argsort(cluster, stable=True)
        counts = torch.bincount(cluster, minlength=len(self.bounds)).tolist()  # the only synchronisation of a step
        pieces = [torch.zeros(counts[0], device=rows.device)]
        for places, begin, tail in zip(order.split(counts)[1:], self.bounds, self.tails, strict=False):
            # Empty clusters are evaluated too, so that every parameter has a gradient in every step.
            scores = tail(rows.index_select(0, places)).float()
            pieces.append(F.cross_entropy(scores, right[places] - begin, reduction="none"))
        return losses.index_add(0, order, torch.cat(pieces))


class SampledSoftmax(LargeSoftmax):
    """Linear layer over a vocabulary with a sampled softmax loss (Jean et al. 2015; Jozefowicz et al. 2016, 3.1).

    The loss compares the target with ``samples`` tokens, fewer than V, drawn by `draw` from `log_uniform` once per
    batch. The logarithm of each token's expected count is subtracted from its score, so the scores that minimise this
    loss are those of the full softmax, up to a constant per position. A drawn token that equals the target of a
    position is left out there (accidental hit). The draw has the distribution of repeated draws until enough distinct
    tokens are found, which is how TensorFlow's sampler works, with the host deciding when to stop.
    """

    def __init__(self, features: int, vocabulary_size: int, samples: int) -> None:
        super().__init__()
        self.samples, self.vocabulary_size = samples, vocabulary_size
        bound = 1 / math.sqrt(features)  # torch's default for a linear layer
        self.weight = nn.Parameter(torch.empty(vocabulary_size, features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(vocabulary_size).uniform_(-bound, bound))

    @override
    def scores(self, given: Tensor) -> Tensor:
        return F.linear(given, self.weight, self.bias)

    def training_losses(self, rows: Tensor, right: Tensor) -> Tensor:
        """Return the losses against the drawn tokens."""
        probabilities = log_uniform(len(self.bias), rows.device)
        drawn, time = draw(probabilities, self.samples)
        tokens = torch.cat([right, drawn])  # one lookup: one gradient of the size of the matrix instead of two
        vectors = F.embedding(tokens, self.weight)
        # F.embedding sums gradients in FP32; indexing would sum them in the dtype of the bias.
        biases = F.embedding(tokens, self.bias.unsqueeze(1)).squeeze(1).float()
        count = len(right)
        of_right = torch.bmm(rows.unsqueeze(1), vectors[:count].unsqueeze(2)).view(count).float() + biases[:count]
        of_drawn = (rows @ vectors[count:].t()).float() + biases[count:]
        expected = inclusion(probabilities[tokens], time).log()
        of_drawn = of_drawn - expected[count:]
        of_drawn = of_drawn.masked_fill(right.unsqueeze(1) == drawn, -math.inf)
        of_right = of_right - expected[:count]
        # The target is always included, so no row consists of -inf only.
        return torch.cat([of_right.unsqueeze(1), of_drawn], 1).logsumexp(1) - of_right


def log_uniform(vocabulary_size: int, device: torch.device) -> Tensor:
    """Return probabilities by Zipf's law, ``log((k + 2) / (k + 1)) / log(V + 1)`` for token k, float32 ``[V]``.

    It is TensorFlow's ``log_uniform_candidate_sampler``, used by Jozefowicz et al., and recomputed on every call,
    because a buffer would be cast to the model's dtype.
    """
    places = torch.arange(1, vocabulary_size + 1, dtype=torch.float32, device=device)
    return places.reciprocal().log1p() / math.log(vocabulary_size + 1)


def draw(probabilities: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Draw tokens without replacement, with torch's default generator and without synchronising with the device.

    Each token gets a random time from the exponential distribution whose rate is its probability (float32 ``[V]``,
    above 0); the ``samples`` tokens with the smallest times, int64, are returned, and the time of the next one,
    float32 scalar.
    """
    times = torch.empty_like(probabilities).exponential_() / probabilities
    first = torch.topk(times, samples + 1, largest=False)
    return first.indices[:-1], first.values[-1]


def inclusion(probabilities: Tensor, time: Tensor) -> Tensor:
    """Return the probability that `draw` includes a token, ``1 - exp(-p t)`` (Kool et al. 2019, section 4.1), float32.

    It is at least the smallest normal number, so that the logarithm is finite.
    """
    return (-torch.expm1(-probabilities * time)).clamp_min(torch.finfo(torch.float32).tiny)


def exact(
    rows: Tensor, right: Tensor, scores: Callable[[Tensor], Tensor], vocabulary_size: int
) -> tuple[Tensor, Tensor]:
    """Return losses in nats, float32 ``[R]``, and best guesses, int64 ``[R]``, in parts that fit into memory.

    ``scores`` maps rows ``[r, F]`` to scores or log-probabilities ``[r, V]``.
    """
    size = max(1, SCORES_AT_A_TIME // vocabulary_size)
    losses, best = [], []
    for part, targets in zip(rows.split(size), right.split(size), strict=True):
        of_part = scores(part).float()
        losses.append(F.cross_entropy(of_part, targets, reduction="none"))
        best.append(of_part.argmax(1))
    return torch.cat(losses), torch.cat(best)
