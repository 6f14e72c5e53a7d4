"""Divides utterances into those trained on and those held out."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from mptrain.dataset.draws import permutation
from mptrain.dataset.partition import first_samples
from mptrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mptrain.dataset.speech_dataset import Utterance

_FIXED = 20151208  # names the one permutation in use; changing it changes every split


def hold_out_utterances(
    name: str, utterances: Sequence[Utterance], shares: dict[str, float], train_samples: int | None
) -> dict[str, list[Utterance]]:
    """Divide utterances by a permutation that is the same in every run.

    Utterances with the same transcript stay together, so that none which is tested on was spelled in training.

    Args:
        name: Of the data set, for messages.
        utterances: All of them.
        shares: Of ``val`` and ``test`` in the number of utterances; what has no share, or 0, gets none.
        train_samples: Train on so many only; None trains on all that are not held out.

    Returns:
        ``train`` and each part that has a share.

    Raises:
        ConfigError: Nothing would be left to train on, or fewer than are asked for.
    """
    groups: dict[str, list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        groups[utterance.text].append(utterance)
    texts = sorted(groups)
    order = iter(permutation(len(texts), _FIXED).tolist())
    parts: dict[str, list[Utterance]] = {}
    for part, share in shares.items():
        wanted = round(share * len(utterances)) if share else 0
        if share:
            parts[part] = []
        while len(parts.get(part, ())) < max(wanted, 1 if share else 0):
            place = next(order, None)
            if place is None:
                break
            parts[part] += groups[texts[place]]
    rest = [utterance for place in order for utterance in groups[texts[place]]]
    if not rest:
        raise ConfigError(
            f"{name} has {len(utterances)} utterances of {len(texts)} transcripts: none is left to train on",
            "choose a smaller dataset.val_share and dataset.test_share (0 for no such part)",
        )
    parts["train"] = [rest[place] for place in first_samples(permutation(len(rest), _FIXED), train_samples).tolist()]
    return parts
