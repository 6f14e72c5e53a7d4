"""Saved configurations as flat maps from dotted key to value: do two describe the same training, which keys differ?

Keys about output locations and intervals (``run``, ``log``, ``logger``, ``checkpoint``) and about monitoring
(``diagnostics``) are ignored, because they do not change the training.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from mptrain.config.value_checks import show
from mptrain.config.yaml_files import read_yaml

#: Keys and sections that may differ when a run is resumed.
IGNORED = ("run", "log", "logger", "diagnostics", "checkpoint", "chosen", "extensions.sinks")

#: In place of the value of a key that a configuration does not have.
ABSENT = "(absent)"

#: Keys that configurations of earlier versions do not have, with the values of what these did.
_EARLIER = {"precision.rounding": "nearest"}


def config_digest(yaml: str, ignoring: Sequence[str] = IGNORED) -> str:
    """Return the SHA-256 (hexadecimal) of a configuration's keys and values, independent of layout and key order.

    The dotted keys and sections in ``ignoring`` are left out.
    """
    flat = {
        key: float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for key, value in flattened(yaml, ignoring).items()
    }
    text = json.dumps(flat, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def diff(old_yaml: str, new_yaml: str, ignoring: Sequence[str] = IGNORED) -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) where two saved configurations differ; ``"(absent)"`` if missing.

    A key that only one of them has, because it is new in a version, is no difference if its value is null, or that of
    what earlier versions did.
    """
    old, new = flattened(old_yaml, ignoring), flattened(new_yaml, ignoring)
    keys = [*old, *(key for key in new if key not in old)]
    sections = {
        key[: dot.start()] for key in keys for dot in re.finditer(r"\.", key)
    }  # null in one, with keys in the other
    changes = [(key, _value(old, key), _value(new, key)) for key in keys if key not in sections]
    return [(key, *values) for key, *values in changes if values[0] != values[1] and not _is_new(key, values)]


def _is_new(key: str, values: Sequence[Any]) -> bool:
    known = [value for value in values if value != ABSENT]
    return len(known) == 1 and (known[0] is None or known[0] == _EARLIER.get(key))


def _value(flat: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key; null if a section above it is null."""
    while key not in flat and "." in key:
        key = key.rpartition(".")[0]
    return flat.get(key, ABSENT)


def describe_change(key: str, before: Any, after: Any) -> str:
    """Describe one difference between configurations, with values as in YAML: ``train.clip_norm was null, now 1``."""
    return f"{key} was {show(before)}, now {show(after)}"


def flattened(yaml: str, ignoring: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of a configuration by dotted key, without the keys and sections in ``ignoring``."""
    flat: dict[str, Any] = {}

    def visit(node: Any, key: str) -> None:
        if any(key == name or key.startswith(name + ".") for name in ignoring):
            return
        if isinstance(node, dict) and node:
            for name, value in node.items():
                visit(value, f"{key}.{name}" if key else str(name))
        else:
            flat[key] = node

    visit(read_yaml(yaml), "")
    return flat


#: Keys that do not change the training, and the seed, in which the runs of an arm differ.
NOT_COMPARED = (*IGNORED, "seed", "extensions")


#: Keys about the machine. They mainly change speed; fairness compares the recorded device and threads instead.
MACHINE = ("device", "threads")


@lru_cache(maxsize=4096)
def flat_settings(yaml: str) -> Mapping[str, Any]:
    """Return the YAML text of a configuration as a flat map from dotted key, such as ``train.batch_size``, to value.

    Empty sections are left out. Results are cached, because one comparison reads the same configuration many times.
    """
    return MappingProxyType({key: value for key, value in flattened(yaml).items() if value != {}})


def config_differences(left: str, right: str, ignoring: Sequence[str] = NOT_COMPARED) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two configurations differ, as key to (left value, right value) with `ABSENT` if missing.

    Both are resolved configurations as YAML text. Keys and sections in ``ignoring`` are left out; by default the seed,
    and keys that do not change the training. So are new keys that change nothing, as by `diff`.
    """
    base, other = flat_settings(left), flat_settings(right)
    keys = [*base, *(key for key in other if key not in base)]
    pairs = {key: (base.get(key, ABSENT), other.get(key, ABSENT)) for key in keys if not is_below(key, ignoring)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and not _is_new(key, pair)}


def is_below(key: str, names: Sequence[str]) -> bool:
    """Return whether a dotted configuration key is one of the names or inside one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def chosen_options(yaml: str) -> dict[str, str]:
    """Return the option that a run's configuration chose in each config group: ``precision`` to ``fp16_dynamic``."""
    prefix = "chosen."
    return {
        key.removeprefix(prefix): str(value) for key, value in flat_settings(yaml).items() if key.startswith(prefix)
    }


def as_number(value: str) -> float | None:
    """Return the finite number that a text contains, such as the value of an override; None for any other text."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def short_label(words: Mapping[str, str], *, whole_keys: bool = False) -> str:
    """Format overrides, from key to value, as a short label such as in the legend of a plot: ``fp16_static, scale=8``.

    Numbers have the last part of their key, or with ``whole_keys`` the whole one, ``scaler.scale=8``.
    """
    return ", ".join(
        value if as_number(value) is None and value else f"{key if whole_keys else key.rpartition('.')[2]}={value}"
        for key, value in words.items()
    )


def flat(config: str) -> dict[str, Any]:
    """Return a configuration as `flat_settings` does; empty if it is missing or unreadable."""
    if not config.strip():
        return {}
    try:
        return {key: value for key, value in flat_settings(config).items() if key}
    except Exception:  # any error of the YAML reader; the report then shows the raw text
        return {}
