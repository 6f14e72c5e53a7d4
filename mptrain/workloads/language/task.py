"""Task of language modelling. Its loss is in FP32: a sum over thousands of tokens and a vocabulary overflows FP16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Exhibit, OneNetworkTask, Texts, perplexity, token_sums

#: Number of windows that the model continues, tokens of each that it is given, and tokens that it generates.
SHOWN, GIVEN, WRITTEN = 4, 32, 32


@dataclass(frozen=True)
class Language(OneNetworkTask):
    """Language-modelling task: predict the next token at every position of a window of text.

    The model is called with a batch's inputs and, by keyword, its other tensors, such as the ``lane`` and ``fresh`` of
    `TextSplit.fetch`. It returns logits ``[N, T, V]``. If it has a true attribute ``takes_targets``, it also gets
    ``targets``, int64 ``[N, T]``, and returns their losses in nats, float32 ``[N, T]``, and its best guesses, int64
    ``[N, T]``. In training the losses may be approximate and the guesses None; in evaluation both are exact.

    Attributes:
        sequence_length: Most tokens that the model reads at a time, to continue a text; None for any number.
        label_smoothing: Share of the target's probability spread over all tokens in training (Vaswani et al. 2017,
            section 5.4). Metrics use the loss without smoothing.
        decode: Function from token numbers to text, to show generated text; None shows nothing.
    """

    vocabulary_size: PositiveInt
    sequence_length: PositiveInt | None = None
    label_smoothing: BelowOneOrZero = 0.0
    decode: Callable[[list[int]], str] | None = None

    metric = "perplexity"
    higher_is_better = False
    term = "tokens"
    refuses = ("sample_rate", "num_classes")  # speech and labelled texts have a vocabulary too

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats; smoothing is a ConfigError if the model computes its losses itself."""
        if not _takes_targets(model):
            return F.cross_entropy(*_logits(model, batch), label_smoothing=self.label_smoothing)
        if self.label_smoothing:
            raise ConfigError(
                f"task.label_smoothing={self.label_smoothing}: {type(model).__name__} computes its losses itself, "
                "without label smoothing",
                "set task.label_smoothing=0, or model.softmax=full",
            )
        losses, _ = model(batch.inputs, **batch.extras, targets=batch.targets)
        return cast("Tensor", losses).mean()

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return each window's ``loss`` in nats, without smoothing, and right guesses, in the device's widest dtype."""
        if _takes_targets(model):
            losses, best = model(batch.inputs, **batch.extras, targets=batch.targets)
        else:
            logits, targets = _logits(model, batch)
            losses = F.cross_entropy(logits, targets, reduction="none").view_as(batch.targets)
            best = logits.argmax(1).view_as(batch.targets)
        return token_sums(losses, best, batch.targets)

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Return ``loss`` and ``perplexity`` of a token, and ``top1``, the share of right first guesses."""
        loss = sums["loss"] / terms
        return {"loss": loss, "perplexity": perplexity(loss), "top1": sums["top1"] / terms}

    @override
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return the mean ``loss`` of a text's tokens in nats, its ``perplexity``, and the model's ``continuation``."""
        losses = (self.measure(model, batch)["loss"] / batch.targets.shape[1]).tolist()
        if self.decode is None:
            return [{"loss": loss, "perplexity": perplexity(loss)} for loss in losses]
        whole = torch.cat([batch.inputs, batch.targets[:, -1:]], 1)
        written = continued(model, whole, WRITTEN, self.sequence_length)
        return [
            {"loss": loss, "perplexity": perplexity(loss), "continuation": self.decode(row)}
            for loss, row in zip(losses, written.tolist(), strict=True)
        ]

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """Show the model's continuations of the beginnings of some windows, if there is ``decode``."""
        if self.decode is None:
            return {}
        windows = batch.inputs[:SHOWN]
        given = min(GIVEN, windows.shape[1] // 2)
        if not given:
            return {}
        room = min(WRITTEN, windows.shape[1] - given)
        written = continued(model, windows[:, :given], room)
        parts = (windows[:, :given], windows[:, given : given + room], written)
        rows = zip(*([self.decode(row) for row in part.tolist()] for part in parts), strict=True)
        return {"continuations": Texts(("text", "true continuation", "model's continuation"), tuple(rows))}


def continued(model: nn.Module, tokens: Tensor, count: int, most: int | None = None) -> Tensor:
    """Continue token sequences, int64 ``[N, T]``, by tokens drawn from the model's predictions, int64 ``[N, count]``.

    The model reads the last ``most`` tokens; None for all. The random numbers have a fixed seed, so equal calls give
    equal tokens. No carried state is used or changed.
    """
    source = torch.Generator(tokens.device).manual_seed(0)
    begin = tokens.shape[1]
    for _ in range(count):
        # A diverged run has NaN or inf logits, from which nothing can be drawn.
        probabilities = model(tokens[:, -(most or 0) :])[:, -1].float().nan_to_num(0.0).softmax(1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=source)], 1)
    return tokens[:, begin:]


def _takes_targets(model: nn.Module) -> bool:
    return bool(getattr(model, "takes_targets", False))


def _logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits, float32 ``[N * T, V]``, and targets, int64 ``[N * T]``."""
    logits = model(batch.inputs, **batch.extras)
    return logits.float().flatten(0, 1), batch.targets.flatten()
