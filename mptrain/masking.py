"""Keeps secrets out of records: the value of an environment variable whose name looks like a secret is written as its name.

``${oc.env:NAME}`` stands where the value was. A configuration and a line of a sweep that hold it mean the same as before, so a
run goes on wherever that variable is set, and whoever is given its folder is given no secret.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

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
            for form in (value.strip(), json.dumps(value.strip())[1:-1], repr(value.strip())[1:-1]):
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


def masked(value: Any) -> Any:
    """The value without the secrets of the environment; see `masker`."""
    return masker()(value)
