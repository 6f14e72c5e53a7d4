"""Finds the translation that a model thinks best: greedily, or among several kept side by side. Host code around a model.

Log-probabilities and their sums are FP32, whatever the model's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mptrain.workloads.text.subwords import BEGIN, END, PAD, UNKNOWN

State = dict[str, Tensor]


class Translator(Protocol):
    """What a model has to offer, besides its ``forward(source, source_lengths, given) -> logits``, to be decoded."""

    def encode(self, source: Tensor, source_lengths: Tensor) -> State:
        """What `step` begins with: tensors by name, each with the samples first, so that rows can be picked.

        Args:
            source: Token numbers, int64 ``[N, S]``, padded behind.
            source_lengths: int64 ``[N]``.
        """
        ...

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits ``[N, V]`` of what follows the last token of each translation, int64 ``[N]``, and the state behind it."""
        ...


def greedy(model: Translator, source: Tensor, source_lengths: Tensor, limits: Tensor) -> Tensor:
    """The most likely token, again and again until the end.

    Args:
        model: In evaluation mode.
        source: Token numbers, int64 ``[N, S]``.
        source_lengths: int64 ``[N]``.
        limits: The most tokens that each translation may have, its end included, int64 ``[N]``.

    Returns:
        int64 ``[N, L]``, padded behind the ends; those that came to their limit have none.
    """
    state = model.encode(source, source_lengths)
    tokens = source.new_full((len(source),), BEGIN)
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    said: list[Tensor] = []
    for place in range(int(limits.max())):
        logits, state = model.step(tokens, state)
        tokens = _log_probabilities(logits).argmax(1).masked_fill(ended, PAD)
        said.append(tokens)
        ended = ended | (tokens == END) | (limits <= place + 1)
        if bool(ended.all()):
            break
    return torch.stack(said, 1)


def beam_search(
    model: Translator, source: Tensor, source_lengths: Tensor, limits: Tensor, beam: int, length_penalty: float
) -> Tensor:
    """The best of the translations that are found with ``beam`` unfinished ones kept at each place.

    A finished one of n tokens, its end included, scores log P / ((5 + n) / 6)^length_penalty (Wu et al. 2016, equation 14,
    without the coverage term). One is finished where its end is among the ``beam`` best continuations. A sentence
    is done when no unfinished translation can score better any more, however it goes on.

    Args:
        model: In evaluation mode.
        source: Token numbers, int64 ``[N, S]``.
        source_lengths: int64 ``[N]``.
        limits: The most tokens that each translation may have, its end included, int64 ``[N]``.
        beam: How many are kept, B.
        length_penalty: The exponent; 0 prefers what is likely, and so what is short.

    Returns:
        int64 ``[N, L]``, padded behind the ends; one that came to its limit has none.
    """
    samples, longest = len(source), int(limits.max())
    state = {name: each.repeat_interleave(beam, 0) for name, each in model.encode(source, source_lengths).items()}
    firsts = torch.arange(samples, device=source.device)[:, None] * beam
    scores = torch.full((samples, beam), -torch.inf, device=source.device)
    scores[:, 0] = 0.0  # the others are copies until they have said something
    tokens = source.new_full((samples, beam, 0), PAD)
    last = source.new_full((samples * beam,), BEGIN)
    best_score = torch.full((samples,), -torch.inf, device=source.device)
    best = source.new_full((samples, longest), PAD)
    done = torch.zeros_like(best_score, dtype=torch.bool)
    for place in range(longest):
        logits, state = model.step(last, state)
        total = scores[:, :, None] + _log_probabilities(logits).unflatten(0, (samples, beam))
        found, which = total.flatten(1).topk(2 * beam)  # at most half of them are ends
        origins, nexts = which // total.shape[2], which % total.shape[2]
        ends = nexts == END

        finished = (found / _penalty(place + 1, length_penalty)).masked_fill(~ends, -torch.inf)
        score, at = finished[:, :beam].max(1)
        better = (score > best_score) & ~done
        said = tokens[firsts[:, 0] // beam, origins.gather(1, at[:, None])[:, 0]]
        best[:, :place] = torch.where(better[:, None], said, best[:, :place])
        best[:, place] = torch.where(better, END, best[:, place])
        best_score = torch.where(better, score, best_score)

        comm = torch.arange(2 * beam, device=source.device) + 2 * beam * ends.long()
        alive = comm.topk(beam, largest=False).indices
        scores, origins, nexts = (each.gather(1, alive) for each in (found, origins, nexts))
        tokens = torch.cat([tokens.gather(1, origins[..., None].expand(-1, -1, place)), nexts[..., None]], 2)
        rows = (firsts + origins).flatten()
        state = {name: each[rows] for name, each in state.items()}
        last = nexts.flatten()

        at_limit = limits == place + 1
        unfinished = at_limit & (best_score == -torch.inf) & ~done
        best[:, : place + 1] = torch.where(unfinished[:, None], tokens[:, 0], best[:, : place + 1])
        done = done | at_limit | (best_score >= scores[:, 0] / _penalty(limits, length_penalty))
        if bool(done.all()):
            break
    return best


def _log_probabilities(logits: Tensor) -> Tensor:
    """FP32 ``[N, V]``; what is no part of a sentence cannot be said."""
    logits = logits.float()
    logits[:, [PAD, UNKNOWN, BEGIN]] = -torch.inf
    return logits.log_softmax(1)


def _penalty(length: int | Tensor, exponent: float) -> Tensor | float:
    penalty: Tensor | float = ((5.0 + length) / 6.0) ** exponent
    return penalty
