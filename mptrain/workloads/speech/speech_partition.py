"""From the utterances of a source to a data set: what is too long is left out, and some of the rest held out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mptrain.errors import ConfigError, DataError
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.base.partition import first_samples, stratified_order
from mptrain.workloads.base.random_streams import permutation
from mptrain.workloads.speech.speech_dataset import Division, Format, SpeechDataset, SpeechSplit, Utterance, usable

_FIXED = 20151208  # names the one permutation in use; changing it changes every split
_FEW = 10  # transcripts of a part held out that are too few to tell how well others would be understood


@dataclass(frozen=True)
class Choices:
    """What a user chooses about any speech; the YAML files explain each. ``shares`` are those of ``val`` and ``test``."""

    form: Format
    max_seconds: float | None
    shares: dict[str, float]
    train_samples: int | None
    batch_size: int
    on_error: OnError


def speech_as_dataset(
    name: str,
    found: Mapping[str, tuple[Sequence[Utterance], Faults]],
    read: Callable[[str], Tensor],
    choices: Choices,
    workers: int | None,
) -> SpeechDataset:
    """Leave out what is too long and what cannot be used, hold out what has no files of its own, and make splits.

    Args:
        name: Of the data set.
        found: Utterances of ``train``, and of ``val`` and ``test`` where they have files, with what was wrong with others.
        read: From the name of an utterance to its samples, int16 ``[T]``; raises `RecordingError`.
        choices: The user's.
        workers: Processes that read files; None where all is in memory.

    Raises:
        DataError: A part has only utterances that are too long, or one cannot be used and ``on_error`` is ``stop``.
        ConfigError: Nothing is left to train on.
    """
    parts: dict[str, list[Utterance]] = {}
    too_long: dict[str, int] = {}
    for part, (utterances, faults) in found.items():
        kept = _short_enough(f"{name} {part}", utterances, choices)
        too_long[part] = len(utterances) - len(kept)
        parts[part] = usable(kept, choices.form, faults)
    shares = {part: share for part, share in choices.shares.items() if part not in found}
    by = divided_by(parts["train"], shares)
    parts |= hold_out_utterances(name, parts["train"], shares, by, choices.train_samples)
    splits = {
        part: SpeechSplit(
            f"{name} {part}",
            utterances,
            choices.form,
            read,
            choices.batch_size,
            found[part][1] if part in found else Faults(choices.on_error),
            in_memory=workers is None,
        )
        for part, utterances in parts.items()
    }
    return SpeechDataset(
        name, choices.form, workers or 0, splits["train"], splits.get("val"), splits.get("test"), too_long, by
    )


def _short_enough(name: str, utterances: Sequence[Utterance], choices: Choices) -> list[Utterance]:
    rate, most = choices.form.features.rate, choices.max_seconds
    kept = [one for one in utterances if most is None or one.samples <= most * rate]
    if utterances and not kept:
        longest = math.ceil(max(one.samples for one in utterances) / rate)
        raise DataError(
            f"{name}: every one of {len(utterances)} utterances is longer than dataset.max_seconds={most:g}",
            f"write dataset.max_seconds={longest}, or null for no limit",
        )
    return kept


def divided_by(utterances: Sequence[Utterance], shares: dict[str, float]) -> Division:
    """What stays together where some utterances are held out: those of the same transcript, or each for itself.

    Where transcripts stay together, none that is tested on was spelled in training. But of the few words of a set of commands
    a network would be tested on those that it never heard, or on a single one. So utterances are divided where a part would
    have fewer than ten different transcripts, and at most half as many as if utterances were divided, or none were left to
    train on.

    Args:
        utterances: All of them.
        shares: As `hold_out_utterances` takes them.

    Returns:
        ``transcript`` or ``utterance``; empty where nothing is held out.
    """
    if not any(shares.values()):
        return ""
    together, rest = _cut(utterances, shares, "transcript")
    apart, _ = _cut(utterances, shares, "utterance")
    for part in together:
        different, possible = (len({utterance.text for utterance in parts[part]}) for parts in (together, apart))
        if not rest or (different < _FEW and different * 2 <= possible):
            return "utterance"
    return "transcript"


def hold_out_utterances(
    name: str, utterances: Sequence[Utterance], shares: dict[str, float], by: Division, train_samples: int | None
) -> dict[str, list[Utterance]]:
    """Divide utterances by a permutation that is the same in every run.

    Args:
        name: Of the data set, for messages.
        utterances: All of them.
        shares: Of ``val`` and ``test`` in the number of utterances; what has no share, or 0, gets none.
        by: See `divided_by`. Divided by ``utterance``, each part has the transcripts in about their overall proportions.
        train_samples: Train on so many only; None trains on all that are not held out.

    Returns:
        ``train`` and each part that has a share.

    Raises:
        ConfigError: Nothing would be left to train on, or fewer than are asked for.
    """
    parts, rest = _cut(utterances, shares, by)
    if not rest:
        texts = {utterance.text for utterance in utterances}
        raise ConfigError(
            f"{name} has {len(utterances)} utterances of {len(texts)} transcripts: none is left to train on",
            "choose a smaller dataset.val_share and dataset.test_share (0 for no such part)",
        )
    parts["train"] = [rest[place] for place in first_samples(permutation(len(rest), _FIXED), train_samples).tolist()]
    return parts


def _cut(
    utterances: Sequence[Utterance], shares: dict[str, float], by: Division
) -> tuple[dict[str, list[Utterance]], list[Utterance]]:
    """The parts that are held out, as `hold_out_utterances` says, and what is left."""
    groups: dict[str, list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        groups[utterance.text].append(utterance)
    texts = sorted(groups)
    if by == "utterance":
        numbers = {text: number for number, text in enumerate(texts)}
        order = stratified_order(torch.tensor([numbers[utterance.text] for utterance in utterances]))
        units = iter([[utterances[place]] for place in order.tolist()])
    else:
        units = iter([groups[texts[place]] for place in permutation(len(texts), _FIXED).tolist()])
    parts: dict[str, list[Utterance]] = {}
    for part, share in shares.items():
        if share:
            parts[part] = []
            while len(parts[part]) < max(1, round(share * len(utterances))):
                unit = next(units, None)
                if unit is None:
                    break
                parts[part] += unit
    return parts, [utterance for unit in units for utterance in unit]
