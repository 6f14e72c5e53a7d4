"""Task of language modelling: predict each next token; cross-entropy over tokens, and perplexity.

Logits are cast to FP32 before the loss, because a sum over thousands of tokens and a whole vocabulary overflows FP16.

A model may compute its losses itself if logits of the whole vocabulary would be too large; see `Language`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mptrain.device import widest
from mptrain.errors import ConfigError
from mptrain.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.exhibits import Exhibit, Texts
from mptrain.workloads.base.perplexity import perplexity
from mptrain.workloads.base.task import Objective, Task

#: Number of windows that the model continues, tokens of each that it is given, and tokens that it generates.
SHOWN, GIVEN, WRITTEN = 4, 32, 32


@dataclass(frozen=True)
class Language(Task):
    """Language-modelling task: predict the next token at every position of a window of text.

    The model is called with a batch's inputs and, by keyword, its other tensors. If state is carried from batch to
    batch, these are ``lane``, the row of the state that each sample continues, and ``fresh``, whether a sample starts
    from zeros instead. The model returns logits ``[N, T, V]``.

    A model with a true attribute ``takes_targets`` also gets ``targets``, int64 ``[N, T]``, and returns their losses in
    nats, float32 ``[N, T]``, and its best guesses, int64 ``[N, T]``. In training the losses may be approximate and the
    guesses None; in evaluation both are exact. Without targets it returns logits.

    Attributes:
        vocabulary_size: Number of tokens in the vocabulary, V.
        label_smoothing: Share of the target's probability spread over all tokens in training (0.1 in Vaswani et al.
            2017, section 5.4). Metrics use the loss without smoothing.
        decode: Function from token numbers to text, to show generated text; None shows nothing.
    """

    vocabulary_size: PositiveInt
    label_smoothing: BelowOneOrZero = 0.0
    decode: Callable[[list[int]], str] | None = None

    metric = "perplexity"
    higher_is_better = False
    term = "tokens"
    refuses = ("sample_rate", "num_classes")  # speech and labelled texts have a vocabulary too

    def objectives(self) -> tuple[Objective, ...]:
        """Return the training losses of the task: one, `loss`, for all parameters of the model."""
        return (Objective(learner="main", modules=("",), loss=self.loss),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the training loss: mean cross-entropy in nats over all tokens of a batch, float32 scalar.

        Args:
            model: Language model; see `Language` for its interface.
            batch: Micro-batch on the device.

        Raises:
            ConfigError: Label smoothing is on, but the model computes its losses itself.
        """
        if not _takes_targets(model):
            return F.cross_entropy(*_logits(model, batch), label_smoothing=self.label_smoothing)
        if self.label_smoothing:
            raise ConfigError(
                f"task.label_smoothing={self.label_smoothing}: {type(model).__name__} computes its losses itself, "
                "without label smoothing",
                "set task.label_smoothing=0, or model.softmax=full",
            )
        losses, _ = model(batch.inputs, **batch.more, targets=batch.targets)
        return cast("Tensor", losses).mean()

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the sums that the validation metrics need, for each window of a batch; see `Task.measure`.

        Returns:
            ``loss``, the cross-entropy in nats summed over the window's tokens, without label smoothing, and ``top1``,
            the number of targets that are the most probable token. Both have the shape ``[N]`` and are in float64, or
            in float32 on devices without it.
        """
        if _takes_targets(model):
            losses, best = model(batch.inputs, **batch.more, targets=batch.targets)
        else:
            logits, targets = _logits(model, batch)
            losses = F.cross_entropy(logits, targets, reduction="none").view_as(batch.targets)
            best = logits.argmax(1).view_as(batch.targets)
        return {
            "loss": losses.sum(1, dtype=widest(losses.device)),
            "top1": (best == batch.targets).sum(1, dtype=widest(losses.device)),
        }

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Return the metrics of a whole split from the sums of `measure`.

        Args:
            sums: Sum of each quantity of `measure` over the split.
            terms: Number of target tokens in the split.

        Returns:
            ``loss``: mean cross-entropy in nats a token; ``perplexity``: its exponential; ``top1``: share of targets
            that are the most probable token.
        """
        loss = sums["loss"] / terms
        return {"loss": loss, "perplexity": perplexity(loss), "top1": sums["top1"] / terms}

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """Generate text to show after a validation: the model's continuations of the beginnings of some windows.

        Returns:
            ``continuations``: a table of the given text, its true continuation and the model's. Empty without
            ``decode``, or for windows of a single token.
        """
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


def continued(model: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """Continue token sequences: draw one token after the other from the model's predictions.

    The random numbers have a fixed seed, so equal calls give equal tokens.

    Args:
        model: Model that returns logits; the call uses and changes no carried state.
        tokens: Tokens to continue, int64 ``[N, T]``.
        count: Number of tokens to draw.

    Returns:
        Drawn tokens, int64 ``[N, count]``.
    """
    source = torch.Generator(tokens.device).manual_seed(0)
    begin = tokens.shape[1]
    for _ in range(count):
        # A diverged run has NaN or inf logits, from which nothing can be drawn.
        probabilities = model(tokens)[:, -1].float().nan_to_num(0.0).softmax(1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=source)], 1)
    return tokens[:, begin:]


def _takes_targets(model: nn.Module) -> bool:
    return bool(getattr(model, "takes_targets", False))


def _logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits, float32 ``[N * T, V]``, and targets, int64 ``[N * T]``, of a batch."""
    logits = model(batch.inputs, **batch.more)
    return logits.float().flatten(0, 1), batch.targets.flatten()
