"""Says whether two saved configurations describe the same training, and where they differ.

Keys about where things are written and how often (``run``, ``log``, ``logger``, ``checkpoint``), or what is looked at
(``diagnostics``), never count: they change no number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from mptrain.config.value_checks import show
from mptrain.config.yaml_files import read_yaml

#: Keys and sections that may differ between a run and its continuation.
IGNORED = ("run", "log", "logger", "diagnostics", "checkpoint", "chosen")

_ABSENT = "(absent)"


def config_digest(yaml: str, ignoring: Sequence[str] = IGNORED) -> str:
    """SHA-256, in hexadecimal, of what a configuration says, whatever its layout and the order of its keys.

    Args:
        yaml: `Config.yaml`.
        ignoring: Dotted keys, or sections, that do not count.
    """
    flat = {
        key: float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for key, value in _flat(yaml, ignoring).items()
    }
    text = json.dumps(flat, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def diff(old_yaml: str, new_yaml: str, ignoring: Sequence[str] = IGNORED) -> list[tuple[str, Any, Any]]:
    """The keys whose values differ: dotted key, old value, new value; ``"(absent)"`` where a side has none.

    Args:
        old_yaml: `Config.yaml` of the run that exists.
        new_yaml: `Config.yaml` of the run that is asked for.
        ignoring: Dotted keys, or sections, that do not count.
    """
    old, new = _flat(old_yaml, ignoring), _flat(new_yaml, ignoring)
    keys = [*old, *(key for key in new if key not in old)]
    return [
        (key, old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in keys
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def describe_change(key: str, before: Any, after: Any) -> str:
    """One difference as a reader of YAML knows its values: ``train.clip_norm was null, now 1``."""
    return f"{key} was {show(before)}, now {show(after)}"


def _flat(yaml: str, ignoring: Sequence[str]) -> dict[str, Any]:
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
