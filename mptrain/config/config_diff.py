"""Comparison of two saved configurations: do they describe the same training, and which keys differ?

Keys about output locations and intervals (``run``, ``log``, ``logger``, ``checkpoint``) and about monitoring
(``diagnostics``) are ignored, because they do not change the training.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mptrain.config.value_checks import show
from mptrain.config.yaml_files import read_yaml

#: Keys and sections that may differ when a run is resumed.
IGNORED = ("run", "log", "logger", "diagnostics", "checkpoint", "chosen", "extensions.sinks")

#: In place of the value of a key that a configuration does not have.
ABSENT = "(absent)"


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
    """Return (key, old value, new value) where two saved configurations differ; ``"(absent)"`` if missing."""
    old, new = flattened(old_yaml, ignoring), flattened(new_yaml, ignoring)
    keys = [*old, *(key for key in new if key not in old)]
    sections = {
        key[: dot.start()] for key in keys for dot in re.finditer(r"\.", key)
    }  # null in one, with keys in the other
    changes = [(key, _value(old, key), _value(new, key)) for key in keys if key not in sections]
    return [change for change in changes if change[1] != change[2]]


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
