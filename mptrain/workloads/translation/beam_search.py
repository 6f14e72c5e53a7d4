"""Decoding of translation models, greedily or with a beam. The search runs on the host around a model.

Log-probabilities and their sums are in FP32, whatever the model's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mptrain.workloads.text.subwords import BEGIN, END, PAD, UNKNOWN

State = dict[str, Tensor]


class Translator(Protocol):
    """Interface of a translation model for decoding; for training it has ``forward`` besides."""

    def encode(self, source: Tensor, source_lengths: Tensor) -> State:
        """Encode sentences, int64 ``[N, S]``, padded at the end, as the initial state of `step`.

        The tensors of a state have samples as the first dimension, so that a search can select and repeat rows.
        """
        ...

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Take one more token of each translation, int64 ``[N]``, and return the next logits, ``[N, V]``, and state."""
        ...


def greedy(model: Translator, source: Tensor, source_lengths: Tensor, limits: Tensor) -> Tensor:
    """Translate a batch of sentences by the most likely token at each position; the result is as in `beam_search`."""
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
    """Translate a batch of sentences by beam search: keep the ``beam`` best unfinished hypotheses at each position.

    A finished translation of n tokens, including the end token, scores log P / ((5 + n) / 6)^length_penalty (Wu et al.
    2016, equation 14, without the coverage term). A translation is finished if its end token is among the ``beam`` best
    continuations. A sentence is done when no unfinished hypothesis can still reach a better score. ``limits``, int64
    ``[N]``, are the largest numbers of tokens, including the end token; a ``length_penalty`` of 0 favours short
    translations. Returns token numbers, int64 ``[N, L]``, padded after the end token; a translation that reaches its
    limit has none. The model is in evaluation mode.
    """
    samples, longest = len(source), int(limits.max())
    state = {name: each.repeat_interleave(beam, 0) for name, each in model.encode(source, source_lengths).items()}
    firsts = torch.arange(samples, device=source.device)[:, None] * beam
    scores = torch.full((samples, beam), -torch.inf, device=source.device)
    scores[:, 0] = 0.0  # the other hypotheses are identical at the start
    tokens = source.new_full((samples, beam, 0), PAD)
    last = source.new_full((samples * beam,), BEGIN)
    best_score = torch.full((samples,), -torch.inf, device=source.device)
    best = source.new_full((samples, longest), PAD)
    done = torch.zeros_like(best_score, dtype=torch.bool)
    for place in range(longest):
        logits, state = model.step(last, state)
        total = scores[:, :, None] + _log_probabilities(logits).unflatten(0, (samples, beam))
        found, which = total.flatten(1).topk(2 * beam)  # at most half of them are end tokens
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
    """Return log-probabilities, float32 ``[N, V]``, with -inf for tokens that cannot be part of a translation."""
    logits = logits.float()
    logits[:, [PAD, UNKNOWN, BEGIN]] = -torch.inf
    return logits.log_softmax(1)


def _penalty(length: int | Tensor, exponent: float) -> Tensor | float:
    penalty: Tensor | float = ((5.0 + length) / 6.0) ** exponent
    return penalty
