"""Keeps secrets out of records: the value of an environment variable whose name looks like a secret is written as its name.

``${oc.env:NAME}`` stands where the value was. A configuration and a line of a sweep that hold it mean the same as before, so a
run goes on wherever that variable is set, and whoever is given its folder is given no secret.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
from collections.abc import Callable
from typing import Any, Final

#: Letters that a value needs to count: shorter ones stand in many texts by chance.
SHORTEST: Final = 8

_NAMES: Final = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def masker() -> Callable[[Any], Any]:
    """A function that replaces every secret that the environment holds now.

    It takes text, or lists, tuples and dicts of whatever; numbers stay what they are.
    """
    secrets: dict[str, str] = {}
    for name, value in os.environ.items():
        if _NAMES.search(name) and len(value.strip()) >= SHORTEST:
            for form in _forms(value.strip()):
                secrets.setdefault(form, f"${{oc.env:{name}}}")
    if not secrets:
        return lambda value: value
    pattern = re.compile("|".join(re.escape(secret) for secret in sorted(secrets, key=len, reverse=True)))

    def mask(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: secrets[found[0]], value)
        if isinstance(value, dict):
            return {mask(key): mask(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            made = [mask(item) for item in value]
            return tuple(made) if isinstance(value, tuple) else made
        return value

    return mask


def _forms(secret: str) -> tuple[str, ...]:
    """A secret as it stands in text, in JSON, in a message, and in pages (by Python's escaping, and by Jinja's)."""
    page = html.escape(secret)
    return (
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
        page,
        page.replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),
    )


class MaskedText(io.TextIOWrapper):
    """A stream of text without the secrets of the environment, as far as each is written at once."""

    def write(self, text: str) -> int:
        """Writes it without them."""
        return super().write(masked(text))


def masked(value: Any) -> Any:
    """The value without the secrets of the environment; see `masker`."""
    return masker()(value)
