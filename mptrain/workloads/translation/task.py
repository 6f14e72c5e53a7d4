"""Task of translation: cross-entropy over the tokens of a translation, perplexity and BLEU.

Logits are cast to FP32 before the loss, and padding is excluded from the loss.

BLEU is that of sacrebleu (Post 2018), 0 to 100, with signature ``nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp``:
n-grams are counted over the whole split. The text is detokenised, and white space of any kind counts as one space.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.device import widest
from mptrain.system.fields import BelowOneOrZero, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mptrain.system.machine import load_extra, require_extra
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Exhibit, OneNetworkTask, Texts, perplexity
from mptrain.workloads.text.subwords import BEGIN, PAD
from mptrain.workloads.translation.beam_search import beam_search, greedy

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
        sums["exact"] = torch.tensor([said == wanted for said, wanted in pairs], dtype=torch.float64)
        rows = [self._counted(said, wanted) for said, wanted in pairs]
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

    def _counted(self, said: str, wanted: str) -> list[float]:
        score = self._bleu.sentence_score(said, [wanted])
        return [*score.counts, *score.totals, score.sys_len, score.ref_len]
