"""Masking of secrets in records: values of environment variables whose names look like secrets.

A value is replaced by ``${oc.env:NAME}``, which Hydra resolves again. So a masked configuration or sweep can be resumed
wherever the variable is set, and a run directory can be shared without the secret.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
from collections.abc import Callable
from typing import Any, Final

#: Minimum length of a secret: shorter values occur in many texts by chance.
SHORTEST: Final = 8

_NAMES: Final = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def masker() -> Callable[[Any], Any]:
    """Return a function that replaces secrets by references to their environment variables: ``${oc.env:NAME}``.

    Secrets are the values of at least `SHORTEST` characters of environment variables whose names contain TOKEN, KEY,
    SECRET, PASSWORD, PASSWD or CREDENTIAL. The environment is read once, by this call.

    Returns:
        A function of text, or of lists, tuples and dicts of any values; numbers are returned unchanged.
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
    """Return the forms of a secret in text, JSON, messages and HTML pages (escaped by Python and by Jinja)."""
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
    """Text stream that replaces secrets from environment variables in everything written to it; see `masker`.

    A secret that is split over two writes is not masked.
    """

    def write(self, text: str) -> int:
        """Write text with its secrets masked, and return the number of characters written."""
        return super().write(masked(text))


def masked(value: Any) -> Any:
    """Return a value with all secrets from environment variables replaced by ``${oc.env:NAME}``; see `masker`.

    Args:
        value: Text, or lists, tuples and dicts of any values; numbers are returned unchanged.
    """
    return masker()(value)
