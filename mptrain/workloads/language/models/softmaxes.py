"""Last layers for large vocabularies: one with rare tokens in clusters, one that compares with some tokens alone in training.

Logarithms of probabilities, scores, corrections and the softmax are FP32 whatever the layer's dtype; so is everything that
decides what is drawn, which is therefore the same in every precision. Nothing is known of what lies below.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Scores that are held at a time in evaluation: 256 MiB of them in FP32.
SCORES_AT_A_TIME = 2**26


class AdaptiveSoftmax(nn.Module):
    """A softmax over the frequent tokens and clusters of rare ones, and one within each cluster (Grave et al. 2017).

    Cluster i, counted from 1, has rows of F / shrink^i numbers, so rare tokens cost little memory and, since only those
    places of a batch are looked at whose token stands in the cluster, little time. The vocabulary must be sorted by
    frequency. The same function as `torch.nn.AdaptiveLogSoftmaxWithLoss` with ``div_value=shrink``,
    but that one keeps logarithms in the dtype of its input, where FP16 says of a token with a probability of 1/e^16 no more
    than to the nearest hundredth, and sums up in half. Training waits for the device once a step, to learn how many tokens of
    the batch stand in each cluster.

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


class SampledSoftmax(nn.Module):
    """A linear layer over a vocabulary with a sampled softmax for a loss (Jean et al. 2015; Jozefowicz et al. 2016, 3.1).

    The right token is told from tokens drawn for the whole batch. Each score is lowered by the logarithm of how often its
    token is expected among those drawn; so the scores that this loss wants are those of the whole softmax, up to a
    constant of each place. A drawn token that happens to be the right one is left out where it is (an accidental hit).

    Tokens are drawn without replacement from `log_uniform`, so the vocabulary should be sorted by frequency. Each token
    has a clock that rings after a time drawn from the exponential distribution with its probability as the rate; the
    first ``samples`` to ring are taken. They are distributed as those of a draw that is repeated until so many different
    ones are found, which is how TensorFlow's sampler does it with the host deciding when to stop. Given the time t of the
    next ring, token k is there with probability ``1 - exp(-p(k) t)`` (Kool et al. 2019, section 4.1).

    Args:
        features: Numbers of a place, F.
        vocabulary_size: How many tokens there are, V.
        samples: How many are drawn, less than V.
    """

    def __init__(self, features: int, vocabulary_size: int, samples: int) -> None:
        super().__init__()
        self.samples = samples
        bound = 1 / math.sqrt(features)  # torch's own of a linear layer
        self.weight = nn.Parameter(torch.empty(vocabulary_size, features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(vocabulary_size).uniform_(-bound, bound))

    def forward(self, given: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """Scores of all tokens, or what targets cost.

        Args:
            given: ``[N, T, F]``.
            targets: Token numbers, int64 ``[N, T]``.

        Returns:
            Without targets: scores ``[N, T, V]``. With them: the losses of the targets, float32 ``[N, T]``, and the best
            guesses, int64 ``[N, T]``. In training the losses are sampled and there are no guesses: None.
        """
        if targets is None:
            scores: Tensor = F.linear(given, self.weight, self.bias)
            return scores
        rows, right = given.flatten(0, 1), targets.flatten()
        if self.training:
            return self._sampled(rows, right).view_as(targets), None
        losses, best = exact(rows, right, lambda part: F.linear(part, self.weight, self.bias), len(self.bias))
        return losses.view_as(targets), best.view_as(targets)

    def _sampled(self, rows: Tensor, right: Tensor) -> Tensor:
        """Losses float32 ``[R]`` of the right tokens ``[R]`` at rows ``[R, F]``."""
        probabilities = log_uniform(len(self.bias), rows.device)
        drawn, time = draw(probabilities, self.samples)
        tokens = torch.cat([right, drawn])  # looked up together: one gradient of the size of the matrix, not two
        vectors = F.embedding(tokens, self.weight)
        # As an embedding, whose gradients are summed in FP32: an index's are summed in the dtype of the bias.
        biases = F.embedding(tokens, self.bias.unsqueeze(1)).squeeze(1).float()
        count = len(right)
        of_right = torch.bmm(rows.unsqueeze(1), vectors[:count].unsqueeze(2)).view(count).float() + biases[:count]
        of_drawn = (rows @ vectors[count:].t()).float() + biases[count:]
        expected = inclusion(probabilities[tokens], time).log()
        of_drawn = of_drawn - expected[count:]
        of_drawn = of_drawn.masked_fill(right.unsqueeze(1) == drawn, -math.inf)
        of_right = of_right - expected[:count]
        # The right one is always there, so no row consists of -inf alone.
        return torch.cat([of_right.unsqueeze(1), of_drawn], 1).logsumexp(1) - of_right


def log_uniform(vocabulary_size: int, device: torch.device) -> Tensor:
    """Zipf's law: token k has the probability ``log((k + 2) / (k + 1)) / log(V + 1)``, which falls like 1 / k.

    That of TensorFlow's ``log_uniform_candidate_sampler``, which Jozefowicz et al. trained with. Computed each time: in a
    buffer it would be rounded with the rest of the model.

    Returns:
        float32 ``[V]``.
    """
    places = torch.arange(1, vocabulary_size + 1, dtype=torch.float32, device=device)
    return places.reciprocal().log1p() / math.log(vocabulary_size + 1)


def draw(probabilities: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Draw different tokens, from torch's default generator.

    Args:
        probabilities: float32 ``[V]``, all above 0.
        samples: How many, less than V.

    Returns:
        Tokens, int64 ``[samples]``, and when the next one would have rung, float32 scalar.
    """
    times = torch.empty_like(probabilities).exponential_() / probabilities
    first = torch.topk(times, samples + 1, largest=False)
    return first.indices[:-1], first.values[-1]


def inclusion(probabilities: Tensor, time: Tensor) -> Tensor:
    """The probability of having rung by a time, at least the smallest normal number, so that it has a logarithm."""
    return (-torch.expm1(-probabilities * time)).clamp_min(torch.finfo(torch.float32).tiny)


def exact(
    rows: Tensor, right: Tensor, scores: Callable[[Tensor], Tensor], vocabulary_size: int
) -> tuple[Tensor, Tensor]:
    """What the right tokens cost, and which would have been best, by the whole softmax in parts that fit into memory.

    Args:
        rows: What the last layer is given, ``[R, F]``.
        right: Token numbers, int64 ``[R]``.
        scores: From rows to the scores of all tokens, ``[r, V]``; logarithms of probabilities will do.
        vocabulary_size: V.

    Returns:
        Losses in nats, float32 ``[R]``, and best guesses, int64 ``[R]``.
    """
    size = max(1, SCORES_AT_A_TIME // vocabulary_size)
    losses, best = [], []
    for part, targets in zip(rows.split(size), right.split(size), strict=True):
        of_part = scores(part).float()
        losses.append(F.cross_entropy(of_part, targets, reduction="none"))
        best.append(of_part.argmax(1))
    return torch.cat(losses), torch.cat(best)
