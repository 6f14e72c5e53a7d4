"""What a run was told: its configuration as flat keys, the options that were chosen, the words of its command."""

from __future__ import annotations

from typing import Any

from mptrain.comparison.settings import settings


def flat(config: str) -> dict[str, Any]:
    """Dotted key to value of a resolved configuration; empty where it is missing or cannot be read."""
    if not config.strip():
        return {}
    try:
        return {key: value for key, value in settings(config).items() if key}
    except Exception:  # whatever a YAML reader says of a damaged file: the report shows the text itself
        return {}


def chosen(found: dict[str, Any], group: str) -> str:
    """The option that was chosen in a group; empty where that is not on record."""
    return str(found.get(f"chosen.{group}") or "")
