"""Task of raw-audio generation: predict the µ-law level of each next sample; cross-entropy, with a softmax in FP32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mptrain.system.fields import NonNegativeFloat, PositiveInt
from mptrain.workloads.audio_generation import audio_dataset
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Exhibit, OneNetworkTask, Sounds, perplexity, token_sums

#: Number of sounds that the model generates, each shown next to the recording that it continues.
SHOWN = 4


@dataclass(frozen=True)
class RawAudio(OneNetworkTask):
    """Raw-audio task: predict the µ-law level (quantised amplitude) of the next sample at every sample of a window.

    The model is called with levels ``[N, L]`` and, by keyword, the other tensors of the batch: speaker, letters. It
    returns logits ``[N, levels, L]``. Targets of -100 are ignored. A model with a method ``drawn`` like that of
    `WaveNet` generates sounds after each validation.

    Attributes:
        seconds: Length of the sounds generated after each validation, in seconds; 0 generates none. Each audio sample
            costs one pass through the network.
        speaker_names: Names of the speakers, or kinds of sound, for captions; empty to show none.
    """

    levels: PositiveInt
    sample_rate: PositiveInt
    seconds: NonNegativeFloat = 0.25
    speaker_names: tuple[str, ...] = ()

    metric = "bits"
    higher_is_better = False
    term = "levels"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats over all positions with a target, float32 scalar."""
        losses, _ = _losses(model, batch)
        return losses.sum() / batch.terms

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return each window's ``loss`` in nats and number of right guesses, ``top1``, in the device's widest dtype."""
        return token_sums(*_losses(model, batch), batch.targets)

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Return ``loss`` in nats and ``bits`` of a level, ``perplexity``, and ``top1``, the share of right guesses."""
        loss = sums["loss"] / terms
        return {"loss": loss, "bits": loss / math.log(2), "perplexity": perplexity(loss), "top1": sums["top1"] / terms}

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """Return continuations of windows by the model, if it can and ``seconds`` is not 0, and recorded ones."""
        draw = getattr(model, "drawn", None)
        count = min(round(self.seconds * self.sample_rate), batch.targets.shape[1])
        if draw is None or count == 0:
            return {}
        some = slice(0, SHOWN)
        inputs, targets = batch.inputs[some], batch.targets[some]
        begin = int((targets >= 0).int().argmax(1).min())  # length of the context, the same in all windows
        count = min(count, targets.shape[1] - begin)
        more = {name: value[some] for name, value in batch.extras.items()}
        if "place" in more:
            more["place"] = more["place"][:, : begin + count]
        source = torch.Generator(inputs.device).manual_seed(0)
        levels = draw(inputs[:, : begin + 1], count, source, **more)
        recorded = targets[:, begin : begin + count]
        silence = audio_dataset.encode(torch.zeros_like(recorded, dtype=torch.float32), self.levels)
        recorded = torch.where(recorded >= 0, recorded, silence)
        speakers = more["speaker"].tolist() if "speaker" in more and self.speaker_names else []
        whose = [f" of {self.speaker_names[number]}" for number in speakers] or [""] * len(levels)
        heard = (
            ("drawn", levels, "Continuation of a recording{} by the model."),
            ("recorded", recorded, "True continuation of that recording{}."),
        )
        return {
            name: Sounds(
                audio_dataset.decode(numbers, self.levels), self.sample_rate, tuple(map(caption.format, whose))
            )
            for name, numbers, caption in heard
        }


def _losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return losses in nats, float32 ``[N, L]``, 0 without a target, and most probable levels, int64 ``[N, L]``."""
    logits = model(batch.inputs, **batch.extras).float()
    return F.cross_entropy(logits, batch.targets, reduction="none"), logits.argmax(1)
