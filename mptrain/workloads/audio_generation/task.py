"""Raw sound: which level follows each sample. Cross-entropy over µ-law levels, in bits a sample.

Logits become FP32 before the softmax, in training and where sounds are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mptrain.device import widest
from mptrain.fields import NonNegativeFloat, PositiveInt
from mptrain.workloads.audio_generation import mu_law
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.exhibits import Exhibit, Sounds
from mptrain.workloads.base.perplexity import perplexity
from mptrain.workloads.base.task import Objective, Task

#: How many sounds the model draws, each beside the recording it was told of.
SHOWN = 4


@dataclass(frozen=True)
class RawAudio(Task):
    """The next level, at every sample of a recording.

    The model is called with levels ``[N, L]`` and, by name, with what else the batch carries: speaker, letters. It answers
    with logits ``[N, levels, L]``. A target of -100 is none. One that has a method ``drawn`` as `mptrain.workloads.audio_generation.models.wavenet.WaveNet` has
    is heard after each validation.

    Attributes:
        levels: How many there are.
        sample_rate: Samples a second, in hertz.
        seconds: Length of the sounds that are drawn; 0 draws none. Each sample is a pass through the network.
        speaker_names: What to call the speakers, or kinds of sound, that the network is told; their numbers where there are
            none.
    """

    levels: PositiveInt
    sample_rate: PositiveInt
    seconds: NonNegativeFloat = 0.25
    speaker_names: tuple[str, ...] = ()

    metric = "bits"
    higher_is_better = False
    term = "levels"

    def objectives(self) -> tuple[Objective, ...]:
        """One loss for all parameters."""
        return (Objective(learner="main", modules=("",), loss=self.loss),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy over all samples that have a target; float32 scalar."""
        losses, _ = _losses(model, batch)
        return losses.sum() / batch.terms

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Of each window the summed loss, and the count of levels that were the best guess; float64 ``[N]``."""
        losses, best = _losses(model, batch)
        return {
            "loss": losses.sum(1, dtype=widest(losses.device)),
            "top1": (best == batch.targets).sum(1, dtype=widest(losses.device)),
        }

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Mean loss in nats and in bits a sample, its exponential, and the fraction of levels guessed."""
        loss = sums["loss"] / terms
        return {"loss": loss, "bits": loss / math.log(2), "perplexity": perplexity(loss), "top1": sums["top1"] / terms}

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """``drawn``: how the model goes on from what came before some windows; ``recorded``: how these go on."""
        draw = getattr(model, "drawn", None)
        count = min(round(self.seconds * self.sample_rate), batch.targets.shape[1])
        if draw is None or count == 0:
            return {}
        some = slice(0, SHOWN)
        inputs, targets = batch.inputs[some], batch.targets[some]
        begin = int((targets >= 0).int().argmax(1).min())  # the same in all: the context
        count = min(count, targets.shape[1] - begin)
        more = {name: value[some] for name, value in batch.more.items()}
        if "place" in more:
            more["place"] = more["place"][:, : begin + count]
        source = torch.Generator(inputs.device).manual_seed(0)
        levels = draw(inputs[:, : begin + 1], count, source, **more)
        recorded = targets[:, begin : begin + count]
        silence = mu_law.encode(torch.zeros_like(recorded, dtype=torch.float32), self.levels)
        recorded = torch.where(recorded >= 0, recorded, silence)
        told = more["speaker"].tolist() if "speaker" in more and self.speaker_names else []
        whose = [f" of {self.speaker_names[number]}" for number in told] or [""] * len(levels)
        heard = (
            ("drawn", levels, "The model goes on from a recording{}."),
            ("recorded", recorded, "How that recording{} went on."),
        )
        return {
            name: Sounds(mu_law.decode(numbers, self.levels), self.sample_rate, tuple(map(caption.format, whose)))
            for name, numbers, caption in heard
        }


def _losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Losses in nats, float32 ``[N, L]``, 0 where there is no target, and best guesses, int64 ``[N, L]``."""
    logits = model(batch.inputs, **batch.more).float()
    return F.cross_entropy(logits, batch.targets, reduction="none"), logits.argmax(1)
