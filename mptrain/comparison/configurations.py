"""Saved configurations as flat mappings, the keys in which two of them differ, and words of a command in short.

What a key means, and whether it may differ, is the business of `mptrain.comparison.fairness`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from mptrain.config.config_diff import IGNORED, diff

#: Stands for the value of a key that a configuration does not have.
ABSENT = "(absent)"

#: What changes no number, or is what runs of one arm differ in.
NOT_COMPARED = (*IGNORED, "seed", "extensions")


#: Keys about the machine. They change speed rather than what is computed; the device and threads on record are compared instead.
MACHINE = ("device", "threads")


@lru_cache(maxsize=4096)
def flat_settings(yaml: str) -> Mapping[str, Any]:
    """Dotted key to value of everything that a configuration says; an empty section says nothing."""
    return MappingProxyType({key: value for key, _, value in diff("{}", yaml, ()) if value != {}})


def config_differences(left: str, right: str, ignoring: Sequence[str] = NOT_COMPARED) -> dict[str, tuple[Any, Any]]:
    """The keys in which two configurations differ: key to (left's value, right's), `ABSENT` where a side has none.

    Args:
        left: YAML text.
        right: YAML text.
        ignoring: Dotted keys, or sections, that do not count.
    """
    one, other = flat_settings(left), flat_settings(right)
    keys = [*one, *(key for key in other if key not in one)]
    return {
        key: (one.get(key, ABSENT), other.get(key, ABSENT))
        for key in keys
        if one.get(key, ABSENT) != other.get(key, ABSENT) and not is_below(key, ignoring)
    }


def is_below(key: str, names: Sequence[str]) -> bool:
    """Return whether a dotted key is one of the names or lies in one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def chosen_options(yaml: str) -> dict[str, str]:
    """Group to the option that was chosen."""
    prefix = "chosen."
    return {
        key.removeprefix(prefix): str(value) for key, value in flat_settings(yaml).items() if key.startswith(prefix)
    }


def as_number(value: str) -> float | None:
    """The number that a word is; None for any other word."""
    try:
        found = float(value)
    except ValueError:
        return None
    return found if abs(found) < float("inf") else None


def short_label(words: Mapping[str, str]) -> str:
    """Words for a legend: options by their names, numbers with the last part of their key: ``fp16_static, scale=8``."""
    return ", ".join(
        value if as_number(value) is None and value else f"{key.rpartition('.')[2]}={value}"
        for key, value in words.items()
    )


def flat(config: str) -> dict[str, Any]:
    """Dotted key to value of a resolved configuration; empty where it is missing or cannot be read."""
    if not config.strip():
        return {}
    try:
        return {key: value for key, value in flat_settings(config).items() if key}
    except Exception:  # whatever a YAML reader says of a damaged file: the report shows the text itself
        return {}
