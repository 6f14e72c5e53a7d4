"""Task of speech recognition: connectionist temporal classification (CTC; Graves et al. 2006) over letters.

Logits are cast to FP32 before the softmax, because the loss sums log-probabilities over hundreds of frames, and a
probability below 6e-8 is 0 in FP16.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.device import in_widest
from mptrain.system.fields import PositiveInt
from mptrain.system.machine import load_extra, require_extra
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Exhibit, OneNetworkTask, Texts

#: Number of transcripts to show.
SHOWN = 12

#: Smallest log-probability of a letter in a frame that beam search considers; ``e ** -12`` is 6e-6.
_LEAST = -12.0


@dataclass(frozen=True)
class Transcribe(OneNetworkTask):
    """Speech recognition task: transcribe utterances into letters with the CTC loss, without an alignment.

    The network is given a batch's inputs and ``lengths``. It returns logits ``[N, T, V]``, where number 0 is the blank,
    and the number of frames of each utterance, int64 ``[N]``. The loss of an utterance is the negative log-probability
    of its transcript, in nats. The loss of a batch is the mean over utterances, as in Amodei et al. 2016, and not over
    letters, so empty transcripts count. A transcript that no path through the frames can spell has an infinite loss.
    Data sets leave out such transcripts; any that remain add neither loss nor gradient, and the metric ``unspellable``
    counts them.

    ``decode`` maps letter numbers to text; ``beam`` is the number of prefixes that the beam search keeps, and 1 takes
    the best letter of each frame.
    """

    decode: Callable[[list[int]], str]
    beam: PositiveInt = 1

    metric = "cer"
    higher_is_better = False
    term = "utterances"

    def __post_init__(self) -> None:
        require_extra("jiwer", "speech", "task=transcribe")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the CTC loss in nats, mean over the utterances of a batch, float32 scalar."""
        return self._losses(*self._heard(model, batch), batch).mean()

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Transcribe a batch and return sums per utterance, float64 ``[N]``.

        ``loss`` in nats and ``unspellable``, 1 if the transcript does not fit its frames, are float32 on devices
        without FP64. The others are ``letter_edits`` and ``word_edits``, insertions, deletions and substitutions
        between transcript and model output, and the lengths ``letters`` and ``words`` of the transcript.
        """
        heard, lengths = self._heard(model, batch)
        losses = self._losses(heard, lengths, batch)
        pairs = self._transcripts(heard, lengths, batch)
        counted = {
            "letter_edits": [_edits(transcript, answer, "characters") for transcript, answer in pairs],
            "letters": [len(transcript) for transcript, _ in pairs],
            "word_edits": [_edits(transcript, answer, "words") for transcript, answer in pairs],
            "words": [len(transcript.split()) for transcript, _ in pairs],
        }
        return {
            "loss": in_widest(losses),
            "unspellable": in_widest(~_spellable(batch, lengths)),
            **{name: torch.tensor(values, dtype=torch.float64) for name, values in counted.items()},
        }

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Return ``loss``, the error rates ``cer`` and ``wer``, and if it is not 0 the share ``unspellable``.

        An error rate is the number of edits per letter, or word, of the transcripts; it can exceed 1.
        """
        metrics = {
            "loss": sums["loss"] / terms,
            "cer": sums["letter_edits"] / max(1.0, sums["letters"]),
            "wer": sums["word_edits"] / max(1.0, sums["words"]),
        }
        return metrics if not sums["unspellable"] else {**metrics, "unspellable": sums["unspellable"] / terms}

    @override
    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        heard, lengths = self._heard(model, batch)
        return {"transcripts": Texts(("reference", "model"), tuple(self._transcripts(heard, lengths, batch)[:SHOWN]))}

    @override
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return the ``transcript`` of each recording."""
        return [{"transcript": answer} for _, answer in self._transcripts(*self._heard(model, batch), batch)]

    def _heard(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of letters, float32 ``[N, T, V]``, and numbers of frames, int64 ``[N]``."""
        logits, lengths = model(batch.inputs, batch.extras["lengths"])
        return F.log_softmax(logits.float(), dim=2), lengths

    def _losses(self, heard: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
        return F.ctc_loss(
            heard.transpose(0, 1),
            batch.targets,
            lengths,
            batch.extras["target_lengths"],
            reduction="none",
            zero_infinity=True,
        )

    def _transcripts(self, heard: Tensor, lengths: Tensor, batch: Batch) -> list[tuple[str, str]]:
        targets, sizes = batch.targets.tolist(), batch.extras["target_lengths"].tolist()
        transcripts = [self.decode(row[:size]) for row, size in zip(targets, sizes, strict=True)]
        if self.beam > 1:
            rows = [frames[:length] for frames, length in zip(heard.cpu(), lengths.tolist(), strict=True)]
            answers = [beam_search(frames, self.beam) for frames in rows]
        else:
            best = heard.argmax(2).tolist()
            answers = [collapsed(row[:length]) for row, length in zip(best, lengths.tolist(), strict=True)]
        return list(zip(transcripts, map(self.decode, answers), strict=True))


def collapsed(path: Sequence[int]) -> list[int]:
    """Return the letters that a CTC path spells: merge repeated numbers, then remove blanks (0)."""
    return [number for index, number in enumerate(path) if number and (index == 0 or path[index - 1] != number)]


def _spellable(batch: Batch, lengths: Tensor) -> Tensor:
    """Return bool ``[N]``: a transcript needs a frame for each letter, and one between two equal letters."""
    sizes = batch.extras["target_lengths"]
    places = torch.arange(1, batch.targets.shape[1], device=sizes.device)
    equal = (batch.targets[:, 1:] == batch.targets[:, :-1]) & (places < sizes[:, None])
    return sizes + equal.sum(1) <= lengths


def _edits(transcript: str, answer: str, unit: str) -> int:
    """Return the number of edits; jiwer strips spaces at both ends of a text, and spaces inside count as letters."""
    if not transcript:  # jiwer cannot align with an empty reference: everything in the answer is an insertion
        return len(answer) if unit == "characters" else len(answer.split())
    alignment = getattr(load_extra("jiwer", "speech", "task=transcribe"), f"process_{unit}")(transcript, answer)
    return int(alignment.substitutions + alignment.deletions + alignment.insertions)


def beam_search(frames: Tensor, width: int) -> list[int]:
    """Return the most probable letters of an utterance by CTC prefix beam search (Hannun et al. 2014, algorithm 1).

    ``frames`` are log-probabilities, float32 ``[T, V]`` on the host. The probability of a prefix is the sum over all
    paths that spell it, while the best path is a single one. No language model is used.
    """
    never = -math.inf
    # prefix: log-probability of all its paths that end in a blank, and of those that end in its last letter
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, never)}
    for row in frames.tolist():
        tried = [(number, value) for number, value in enumerate(row) if number and value > _LEAST]
        grown: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [never, never])
        for prefix, (blank, letter) in beam.items():
            either = _sum(blank, letter)
            _add(grown[prefix], 0, either + row[0])
            if prefix:
                _add(grown[prefix], 1, letter + row[prefix[-1]])
            for number, value in tried:
                # A repeated letter needs a blank in between; without one it extends the previous letter.
                before = blank if prefix and prefix[-1] == number else either
                _add(grown[(*prefix, number)], 1, before + value)
        best = sorted(grown.items(), key=lambda item: -_sum(*item[1]))[:width]
        beam = {prefix: (blank, letter) for prefix, (blank, letter) in best}
    return list(max(beam.items(), key=lambda item: _sum(*item[1]))[0])


def _add(pair: list[float], index: int, value: float) -> None:
    pair[index] = _sum(pair[index], value)


def _sum(first: float, other: float) -> float:
    """Return the logarithm of the sum of two probabilities that are given by their logarithms."""
    large, small = max(first, other), min(first, other)
    return large if small == -math.inf else large + math.log1p(math.exp(small - large))
