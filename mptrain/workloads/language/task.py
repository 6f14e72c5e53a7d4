"""Language modelling: which token comes next. Cross-entropy over tokens, perplexity.

Logits become FP32 before the loss: a sum over thousands of tokens and over a vocabulary overflows FP16.

A model may compute its losses by itself, where logits of a whole vocabulary would be too many: `Language` says how.
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

#: How many windows are written on by the model, how many tokens of each it is shown, and how many it writes.
SHOWN, GIVEN, WRITTEN = 4, 32, 32


@dataclass(frozen=True)
class Language(Task):
    """The next token, at every place of a window of text.

    The model is called with a batch's inputs and, by name, with what else the batch carries: the lane of each sample
    and whether it begins anew, where state is carried from batch to batch. It answers with logits ``[N, T, V]``.

    A model with a true attribute ``takes_targets`` is given ``targets`` as well, int64 ``[N, T]``, and answers with their
    losses in nats, float32 ``[N, T]``, and its best guesses, int64 ``[N, T]``. In training the losses may be those of an
    approximation, and there may be no guesses: None. In evaluation both are exact. Without targets it answers with logits.

    Attributes:
        vocabulary_size: How many tokens there are.
        label_smoothing: Share of the target's probability that is spread over all tokens while training (0.1 in
            Vaswani et al. 2017, section 5.4). What is measured is the plain loss.
        decode: From token numbers to text, to show what the model writes; None shows nothing.
    """

    vocabulary_size: PositiveInt
    label_smoothing: BelowOneOrZero = 0.0
    decode: Callable[[list[int]], str] | None = None

    metric = "perplexity"
    higher_is_better = False
    term = "tokens"
    refuses = ("sample_rate",)  # sound with letters has a vocabulary as well

    def objectives(self) -> tuple[Objective, ...]:
        """One loss for all parameters."""
        return (Objective(learner="main", modules=("",), loss=self.loss),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy over all tokens; float32 scalar.

        Raises:
            ConfigError: The model computes its losses by itself, and labels were to be smoothed.
        """
        if not _takes_targets(model):
            return F.cross_entropy(*_logits(model, batch), label_smoothing=self.label_smoothing)
        if self.label_smoothing:
            raise ConfigError(
                f"task.label_smoothing={self.label_smoothing}: {type(model).__name__} computes its losses by itself, from "
                "the right tokens alone",
                "write task.label_smoothing=0, or model.softmax=full",
            )
        losses, _ = model(batch.inputs, **batch.more, targets=batch.targets)
        return cast("Tensor", losses).mean()

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Of each sample the summed loss, and the count of tokens that were the best guess; float64 ``[N]``."""
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
        """Mean loss in nats a token, its exponential, and the fraction of tokens guessed."""
        loss = sums["loss"] / terms
        return {"loss": loss, "perplexity": perplexity(loss), "top1": sums["top1"] / terms}

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """``continuations``: how the model goes on where some windows of text are broken off."""
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
        return {"continuations": Texts(("text", "goes on", "the model goes on"), tuple(rows))}


def continued(model: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """Tokens drawn one after the other, each from what the model says follows; the same ones in every call.

    Args:
        model: Answers with logits; no state is carried into it or out of it.
        tokens: What to go on from, int64 ``[N, T]``.
        count: How many tokens to draw.

    Returns:
        int64 ``[N, count]``.
    """
    source = torch.Generator(tokens.device).manual_seed(0)
    begin = tokens.shape[1]
    for _ in range(count):
        # NaN and inf, which a run that went wrong has, have no probabilities.
        probabilities = model(tokens)[:, -1].float().nan_to_num(0.0).softmax(1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=source)], 1)
    return tokens[:, begin:]


def _takes_targets(model: nn.Module) -> bool:
    return bool(getattr(model, "takes_targets", False))


def _logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits float32 ``[N * T, V]`` and targets ``[N * T]``."""
    logits = model(batch.inputs, **batch.more)
    return logits.float().flatten(0, 1), batch.targets.flatten()
