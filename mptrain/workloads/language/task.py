"""Task of language modelling. Its loss is in FP32: a sum over thousands of tokens and a vocabulary overflows FP16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.device import widest
from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOneOrZero, NonNegativeInt, PositiveFloat, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.random_streams import mix
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
        length: Number of tokens that `predict` writes.
        temperature: Divisor of the logits from which they are drawn; below 1 the likely ones are drawn more often.
        seed: Changes what is drawn. Each prompt has random numbers of its own, whatever prompts are beside it.
    """

    vocabulary_size: PositiveInt
    sequence_length: PositiveInt | None = None
    label_smoothing: BelowOneOrZero = 0.0
    decode: Callable[[list[int]], str] | None = None
    length: PositiveInt = WRITTEN
    temperature: PositiveFloat = 1.0
    seed: NonNegativeInt = 1

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
        return token_sums(*_losses(model, batch), batch.targets)

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Return ``loss`` and ``perplexity`` of a token, and ``top1``, the share of right first guesses."""
        loss = sums["loss"] / terms
        return {"loss": loss, "perplexity": perplexity(loss), "top1": sums["top1"] / terms}

    @override
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return the mean ``loss`` of a text's tokens in nats, its ``perplexity``, and the model's ``continuation``."""
        lengths = torch.tensor(batch.counts or [batch.targets.shape[1]] * batch.samples, device=batch.inputs.device)
        here = torch.arange(batch.targets.shape[1], device=lengths.device) < lengths[:, None]  # the rest is padding
        losses = (
            torch.where(here, _losses(model, batch)[0], 0).sum(1, dtype=widest(lengths.device)) / lengths
        ).tolist()
        if self.decode is None:
            return [{"loss": loss, "perplexity": perplexity(loss)} for loss in losses]
        whole = torch.cat([batch.inputs[:, :1], batch.targets], 1)
        written = continued(
            model, whole, self.length, self.sequence_length, lengths + 1, temperature=self.temperature, seed=self.seed
        )
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


def continued(
    model: nn.Module,
    tokens: Tensor,
    count: int,
    most: int | None = None,
    lengths: Tensor | None = None,
    *,
    temperature: float = 1.0,
    seed: int | None = None,
) -> Tensor:
    """Continue token sequences, int64 ``[N, T]``, by tokens drawn from the model's predictions, int64 ``[N, count]``.

    Equal calls give equal tokens. No carried state is used or changed. The model reads the last ``most`` tokens; None
    for all. Sequences of other ``lengths``, int64 ``[N]``, are padded at the end, which no position before it reads.
    The logits are divided by ``temperature``. With a ``seed`` each sequence has random numbers of its own, from it and
    its tokens, and so the same ones in every batch; None draws from one generator for all, as exhibits do.
    """
    source = torch.Generator(tokens.device).manual_seed(0)
    sizes = [tokens.shape[1]] * len(tokens) if lengths is None else lengths.tolist()
    numbers = [_numbers(row[:size], count, seed or 0) for row, size in zip(tokens.tolist(), sizes, strict=True)]
    uniform = torch.stack(numbers, 1).to(tokens.device)[..., None]  # [count, N, 1]
    rows, begins = torch.arange(len(tokens), device=tokens.device), torch.tensor(sizes, device=tokens.device)
    tokens = F.pad(tokens, (0, count))
    for step in range(count):
        ends, width = begins + step, min(max(sizes) + step, most or tokens.shape[1])
        starts = (ends - width).clamp(min=0)
        read = tokens.gather(1, starts[:, None] + torch.arange(width, device=tokens.device))
        logits = model(read)[rows, ends - starts - 1].float() / temperature
        # A diverged run has NaN or inf logits, from which nothing can be drawn.
        probabilities = logits.nan_to_num(0.0).softmax(1)
        if seed is None:
            drawn = torch.multinomial(probabilities, 1, generator=source)
        else:
            up_to = probabilities.cumsum(1)
            drawn = torch.searchsorted(up_to, uniform[step] * up_to[:, -1:], right=True).clamp(max=up_to.shape[1] - 1)
        tokens[rows, ends] = drawn[:, 0]
    return tokens.gather(1, begins[:, None] + torch.arange(count, device=tokens.device))


def _numbers(tokens: list[int], count: int, seed: int) -> Tensor:
    """Return the random numbers of a sequence, float32 ``[count]`` from 0 to below 1."""
    return torch.rand(count, generator=torch.Generator().manual_seed(mix(seed, *tokens) >> 1))


def _losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the exact losses of all tokens in nats, without smoothing, and the best guesses; both ``[N, T]``."""
    if _takes_targets(model):
        losses, best = model(batch.inputs, **batch.extras, targets=batch.targets)
        return losses, best
    logits, targets = _logits(model, batch)
    losses = F.cross_entropy(logits, targets, reduction="none").view_as(batch.targets)
    return losses, logits.argmax(1).view_as(batch.targets)


def _takes_targets(model: nn.Module) -> bool:
    return bool(getattr(model, "takes_targets", False))


def _logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits, float32 ``[N * T, V]``, and targets, int64 ``[N * T]``."""
    logits = model(batch.inputs, **batch.extras)
    return logits.float().flatten(0, 1), batch.targets.flatten()
