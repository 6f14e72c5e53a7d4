"""Task of language modelling. Its loss is in FP32: a sum over thousands of tokens and a vocabulary overflows FP16."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.device import widest
from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOneOrZero, NonNegativeFloat, NonNegativeInt, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.random_streams import mix
from mptrain.workloads.base.task import Exhibit, OneNetworkTask, Texts, perplexity, token_sums

#: Number of windows that the model continues, tokens of each that it is given, and tokens that it generates.
SHOWN, GIVEN, WRITTEN = 4, 32, 32

#: Texts that are continued together differ by so many tokens at most: the shorter ones wait for the longest.
SPREAD = 8

#: Tokens of them, whose keys and values are kept (GPT-2 needs 74 kB each), and scores that are computed at a time.
TOKENS, SCORES = 2**14, 2**26


@dataclass(frozen=True)
class Language(OneNetworkTask):
    """Language-modelling task: predict the next token at every position of a window of text.

    The model is called with a batch's inputs and, by keyword, its other tensors, such as the ``lane`` and ``fresh`` of
    `TextSplit.fetch`. It returns logits ``[N, T, V]``. If it has a true attribute ``takes_targets``, it also gets
    ``targets``, int64 ``[N, T]``, and returns their losses in nats, float32 ``[N, T]``, and its best guesses, int64
    ``[N, T]``. In training the losses may be approximate and the guesses None; in evaluation both are exact.

    To continue texts fast, a model may have ``next_logits(tokens, state)``. It takes tokens, int64 ``[N, T]``, and the
    state that it has returned for those before them (None if there are none; else T is 1), and returns the logits of
    the token that follows, ``[N, V]``, and the next state.

    Attributes:
        sequence_length: Most tokens that the model reads at a time, to continue a text; None for any number.
        label_smoothing: Share of the target's probability spread over all tokens in training (Vaswani et al. 2017,
            section 5.4). Metrics use the loss without smoothing.
        decode: Function from token numbers to text, to show generated text; None shows nothing. Its attribute
            ``unknown``, if any, is the number of a token that `predict` does not write.
        length: Number of tokens that `predict` writes.
        temperature: Divisor of the logits from which they are drawn; below 1 the likely ones are drawn more often, and
            with 0 the likeliest is taken.
        seed: Changes what is drawn. Each prompt has random numbers of its own, whatever prompts are beside it.
    """

    vocabulary_size: PositiveInt
    sequence_length: PositiveInt | None = None
    label_smoothing: BelowOneOrZero = 0.0
    decode: Callable[[list[int]], str] | None = None
    length: PositiveInt = WRITTEN
    temperature: NonNegativeFloat = 1.0
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
        counts = batch.counts or (batch.targets.shape[1],) * batch.samples
        answers: list[dict[str, Any]] = [{}] * batch.samples
        for rows in self._groups(counts, keeps=getattr(model, "next_logits", None) is not None):
            sizes, index = tuple(counts[row] for row in rows), torch.tensor(rows, device=batch.inputs.device)
            inputs, targets = (given[index, : max(sizes)] for given in (batch.inputs, batch.targets))
            extras = {name: value[index] for name, value in batch.extras.items()}
            for row, answer in zip(rows, self._answers(model, Batch(inputs, targets, sizes, extras)), strict=True):
                answers[row] = answer
        return answers

    def _groups(self, counts: Sequence[int], *, keeps: bool) -> Iterator[list[int]]:
        """Yield the rows of texts to answer together, the shortest first: of similar length, as many as have room."""
        room = TOKENS if keeps else min(TOKENS, SCORES // self.vocabulary_size)
        rows: list[int] = []
        for row in sorted(range(len(counts)), key=counts.__getitem__):
            full = (len(rows) + 1) * (counts[row] + self.length) > room
            if rows and (full or counts[row] > counts[rows[0]] + SPREAD):
                yield rows
                rows = []
            rows.append(row)
        yield rows

    def _answers(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        lengths = torch.tensor(batch.counts, device=batch.inputs.device)
        here = torch.arange(batch.targets.shape[1], device=lengths.device) < lengths[:, None]  # the rest is padding
        parts = batch.split(-(-batch.targets.numel() * self.vocabulary_size // SCORES))
        each = torch.where(here, torch.cat([_losses(model, part)[0] for part in parts]), 0)
        losses = (each.sum(1, dtype=widest(lengths.device)) / lengths).tolist()
        unknown = getattr(self.decode, "unknown", None)
        known = torch.arange(self.vocabulary_size, device=lengths.device)
        known = known if unknown is None else known[known != unknown]
        if self.decode is None or not len(known):
            return [{"loss": loss, "perplexity": perplexity(loss)} for loss in losses]
        whole = torch.cat([batch.inputs[:, :1], batch.targets], 1)
        written = continued(
            model,
            whole,
            self.length,
            self.sequence_length,
            lengths + 1,
            temperature=self.temperature,
            seed=self.seed,
            choices=known,
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
    choices: Tensor | None = None,
) -> Tensor:
    """Continue token sequences, int64 ``[N, T]``, by tokens drawn from the model's predictions, int64 ``[N, count]``.

    Equal calls give equal tokens. No carried state is used or changed. The model reads the last ``most`` tokens; None
    for all. Sequences of other ``lengths``, int64 ``[N]``, are padded at the end, and no padding is read: the model
    reads all of them up to the same position at a time, and a sequence that is longer there is only read.

    The logits are divided by ``temperature``; with 0 the best one is taken. With a ``seed`` each sequence has random
    numbers of its own, from it and its tokens, and so the same ones in every batch, and the model keeps what it has
    computed (``next_logits``) until there are more than ``most`` tokens, each of which then has another position with
    every new one. None draws from one generator for all, and reads all again, as exhibits do. Only ``choices``, int64
    ``[C]``, are written; None for all.
    """
    source, device = torch.Generator(tokens.device).manual_seed(0), tokens.device
    given = [tokens.shape[1]] * len(tokens) if lengths is None else lengths.tolist()
    order = sorted(range(len(given)), key=given.__getitem__)
    sizes, rows = [given[row] for row in order], torch.tensor(order, device=device)
    begins, tokens = torch.tensor(sizes, device=device)[:, None], F.pad(tokens[rows], (0, count))
    numbers = [_numbers(row[:size], count, seed or 0) for row, size in zip(tokens.tolist(), sizes, strict=True)]
    uniform = torch.stack(numbers).to(device)
    follow = None if seed is None else getattr(model, "next_logits", None)
    state, read = None, 0
    for end in range(sizes[0], sizes[-1] + count):
        now = slice(bisect_right(sizes, end - count), bisect_right(sizes, end))  # those that get a token here
        start = 0 if most is None else max(0, end - most)
        if follow is not None and not start:
            logits, state = follow(tokens[:, read:end], state)
            logits, read = logits[now], end
        elif now.start == now.stop:
            continue
        else:
            window = tokens[now, start:end]
            logits = model(window)[:, -1] if follow is None else follow(window, None)[0]
        logits = logits.float() if choices is None else logits.float()[:, choices]
        drawn = _drawn(logits, temperature, source if seed is None else uniform[now].gather(1, end - begins[now]))
        tokens[now, end] = drawn if choices is None else choices[drawn]
    places = begins + torch.arange(count, device=device)
    return torch.empty_like(places).index_copy_(0, rows, tokens.gather(1, places))


def _drawn(logits: Tensor, temperature: float, by: Tensor | torch.Generator) -> Tensor:
    """Return the columns that are drawn from logits ``[N, V]`` by a generator or random numbers ``[N, 1]``."""
    # A diverged run has NaN or inf logits, from which nothing can be drawn.
    if not temperature:
        return logits.nan_to_num(0.0).argmax(1)
    probabilities = (logits / temperature).nan_to_num(0.0).softmax(1)
    if isinstance(by, torch.Generator):
        return torch.multinomial(probabilities, 1, generator=by)[:, 0]
    up_to = probabilities.cumsum(1)
    whole = up_to[:, -1:]
    below = torch.minimum(by * whole, torch.nextafter(whole, torch.zeros_like(whole)))  # a product may round up
    return torch.searchsorted(up_to, below, right=True)[:, 0]


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
