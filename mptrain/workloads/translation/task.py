"""Task of translation: cross-entropy over the tokens of a translation, perplexity, BLEU, and decoding with a beam.

Logits are cast to FP32 before the loss, and padding is excluded from the loss. The search for a translation runs on
the host around a model; its log-probabilities and their sums are in FP32, whatever the model's dtype.

BLEU is that of sacrebleu (Post 2018), 0 to 100, with signature ``nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp``:
n-grams are counted over the whole split. The text is detokenised, and white space of any kind counts as one space.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.device import widest
from mptrain.system.fields import BelowOneOrZero, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mptrain.system.machine import load_extra, require_extra
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Exhibit, OneNetworkTask, Texts, perplexity
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
    chosen: list[Tensor] = []
    for position in range(int(limits.max())):
        logits, state = model.step(tokens, state)
        tokens = _log_probabilities(logits).argmax(1).masked_fill(ended, PAD)
        chosen.append(tokens)
        ended = ended | (tokens == END) | (limits <= position + 1)
        if bool(ended.all()):
            break
    return torch.stack(chosen, 1)


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
    for position in range(longest):
        logits, state = model.step(last, state)
        total = scores[:, :, None] + _log_probabilities(logits).unflatten(0, (samples, beam))
        top_scores, which = total.flatten(1).topk(2 * beam)  # at most half of them are end tokens
        origins, nexts = which // total.shape[2], which % total.shape[2]
        ends = nexts == END

        finished = (top_scores / _penalty(position + 1, length_penalty)).masked_fill(~ends, -torch.inf)
        score, at = finished[:, :beam].max(1)
        better = (score > best_score) & ~done
        hypotheses = tokens[firsts[:, 0] // beam, origins.gather(1, at[:, None])[:, 0]]
        best[:, :position] = torch.where(better[:, None], hypotheses, best[:, :position])
        best[:, position] = torch.where(better, END, best[:, position])
        best_score = torch.where(better, score, best_score)

        # Ended hypotheses rank behind all others, so that the beam keeps the best unfinished ones.
        ranks = torch.arange(2 * beam, device=source.device) + 2 * beam * ends.long()
        alive = ranks.topk(beam, largest=False).indices
        scores, origins, nexts = (each.gather(1, alive) for each in (top_scores, origins, nexts))
        tokens = torch.cat([tokens.gather(1, origins[..., None].expand(-1, -1, position)), nexts[..., None]], 2)
        rows = (firsts + origins).flatten()
        state = {name: each[rows] for name, each in state.items()}
        last = nexts.flatten()

        at_limit = limits == position + 1
        unfinished = at_limit & (best_score == -torch.inf) & ~done
        best[:, : position + 1] = torch.where(unfinished[:, None], tokens[:, 0], best[:, : position + 1])
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


_SHOWN = 8
_ORDER = 4  # longest n-grams of BLEU
_MATCHES = tuple(f"matches_{order}" for order in range(1, _ORDER + 1))
_NGRAMS = tuple(f"ngrams_{order}" for order in range(1, _ORDER + 1))


@dataclass(frozen=True)
class Translate(OneNetworkTask):
    """Translation task: translate sentences from one language into another; cross-entropy, perplexity and BLEU.

    The model is called as ``model(source, source_lengths, given)`` and returns logits ``[N, T, V]`` of the token after
    each given token: the start token, then the translation. For decoding it is also a `Translator`. References of BLEU
    are limited to what the vocabulary can spell: a character that is not in the training text becomes the sign ⁇ in
    references and in translations, so different unknown characters count as equal.

    Attributes:
        decode: Function from token numbers of a translation to text; ``decode_source`` is that of a sentence.
        label_smoothing: Share of the target's probability spread over all tokens in training (Vaswani et al. 2017,
            section 5.4). Metrics use the loss without smoothing.
        beam: Number of translations that the beam search keeps; 1 decodes greedily; 0 measures only the loss.
        length_penalty: Exponent of the length penalty of beam search (0.6 in Vaswani et al. 2017, see Wu et al. 2016).
        length_factor: Largest number of tokens of a translation per token of its source, before ``length_extra``.
        bleu_tokenizer: Tokenizer of sacrebleu: ``13a``, ``intl``, or ``char`` for languages without spaces.
    """

    target_vocabulary_size: PositiveInt
    decode: Callable[[list[int]], str]
    decode_source: Callable[[list[int]], str]
    label_smoothing: BelowOneOrZero = 0.0
    beam: NonNegativeInt = 1
    length_penalty: NonNegativeFloat = 0.6
    length_factor: PositiveFloat = 2.0
    length_extra: PositiveInt = 10
    bleu_tokenizer: Literal["13a", "intl", "char"] = "13a"

    metric = "perplexity"
    higher_is_better = False
    term = "tokens"
    shares = ("exact",)

    def __post_init__(self) -> None:
        """Raise EnvironmentRefused if sacrebleu is not installed, unless ``beam`` is 0."""
        if self.beam:
            require_extra("sacrebleu", "translation", "task=translate (unless task.beam=0)")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats over all target tokens without padding, float32 scalar."""
        return self._cross_entropy(model, batch, reduction="sum", label_smoothing=self.label_smoothing) / batch.terms

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Translate a batch and return sums per sentence: ``loss`` in nats, without smoothing, and ``sentences``, 1.

        Unless ``beam`` is 0, there are also ``exact``, 1 if the translation equals the reference, and the counts of
        BLEU: ``matches_n`` and ``ngrams_n`` for n from 1 to 4, ``length`` and ``reference_length``. Each is float64
        ``[N]``; the loss is float32 on devices without FP64.
        """
        losses = self._cross_entropy(model, batch, reduction="none").view(batch.targets.shape)
        sums = {
            "loss": losses.sum(1, dtype=widest(losses.device)),
            "sentences": torch.ones(batch.samples, dtype=torch.float64),
        }
        if not self.beam:
            return sums
        pairs = list(zip(self.translations(model, batch), map(self.decode, batch.targets.tolist()), strict=True))
        sums["exact"] = torch.tensor([translation == wanted for translation, wanted in pairs], dtype=torch.float64)
        rows = [self._counted(translation, wanted) for translation, wanted in pairs]
        counts = torch.tensor(rows, dtype=torch.float64).unbind(1)
        names = (*_MATCHES, *_NGRAMS, "length", "reference_length")
        return {**sums, **dict(zip(names, counts, strict=True))}

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Return ``loss`` and ``perplexity``, and unless ``beam`` is 0 ``bleu``, 0 to 100, and ``exact``, a share."""
        loss = sums["loss"] / terms
        metrics = {"loss": loss, "perplexity": perplexity(loss)}
        if not self.beam:
            return metrics
        bleu = self._bleu.compute_bleu(
            correct=[round(sums[name]) for name in _MATCHES],
            total=[round(sums[name]) for name in _NGRAMS],
            sys_len=round(sums["length"]),
            ref_len=round(sums["reference_length"]),
            smooth_method="exp",
        )
        return {**metrics, "bleu": float(bleu.score), "exact": sums["exact"] / sums["sentences"]}

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """Return sources, references and the model's translations of the first sentences, unless ``beam`` is 0."""
        if not self.beam:
            return {}
        first = batch.split(-(-batch.samples // _SHOWN))[0]
        sources = map(self.decode_source, first.inputs.tolist())
        references = map(self.decode, first.targets.tolist())
        rows = zip(sources, references, self.translations(model, first), strict=True)
        return {"translations": Texts(("source", "reference", "model"), tuple(rows))}

    @override
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return the ``translation`` of each sentence."""
        return [{"translation": text} for text in self.translations(model, batch)]

    def translations(self, model: Any, batch: Batch) -> list[str]:
        """Translate the sentences of a batch, greedily or by beam search, and return the text of each translation."""
        lengths = batch.extras["source_lengths"]
        limits = (lengths * self.length_factor).ceil().long() + self.length_extra
        given = (model, batch.inputs, lengths, limits)
        tokens = greedy(*given) if self.beam < 2 else beam_search(*given, self.beam, self.length_penalty)
        return [self.decode(row) for row in tokens.tolist()]

    def _cross_entropy(self, model: nn.Module, batch: Batch, reduction: str, label_smoothing: float = 0.0) -> Tensor:
        given = torch.cat([torch.full_like(batch.targets[:, :1], BEGIN), batch.targets[:, :-1]], 1)
        logits = model(batch.inputs, batch.extras["source_lengths"], given)
        return F.cross_entropy(
            logits.float().flatten(0, 1),
            batch.targets.flatten(),
            ignore_index=PAD,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )

    @functools.cached_property
    def _bleu(self) -> Any:
        library = load_extra("sacrebleu.metrics", "translation", "task=translate")
        return library.BLEU(tokenize=self.bleu_tokenizer, effective_order=True)  # affects only single sentences

    def _counted(self, translation: str, wanted: str) -> list[float]:
        score = self._bleu.sentence_score(translation, [wanted])
        return [*score.counts, *score.totals, score.sys_len, score.ref_len]
