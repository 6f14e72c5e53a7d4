"""What a run may be called: names that stay inside the root of all runs, and fresh ones that nobody else has.

Nothing here touches the disk.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from datetime import datetime

from mptrain.errors import ConfigError
from mptrain.masking import masked

MAX_PART_BYTES = 255  # the longest file name of every common Linux file system
_MAX_LABEL = 120


def check_run_name(name: str) -> str:
    """The name, if ``ROOT/NAME`` is a usable path inside ROOT; sub-folders as in ``a/b`` are allowed.

    Raises:
        ConfigError: Empty, absolute, with ``.`` or ``..`` or empty parts, with control characters, or with a
            part that starts with ``-`` or ``.``, has blanks at its ends, or is too long.
    """
    why = next((why for part in name.split("/") if (why := objection(part))), "")
    if name.startswith("/"):
        why = "is an absolute path"
    if not name:
        why = "is empty"
    if why:
        raise ConfigError(f"run.name={name!r} {why}", "write a name like resnet50 or sweep/seed0, inside run.root")
    return name


def fresh_name(label: str, moment: datetime | None = None) -> tuple[str, str]:
    """A date folder and a run folder that no other run has chosen, except by a chance of 1 in 65,536.

    Args:
        label: ``MODEL-DATASET-PRECISION``; characters that are awkward in a path become ``_``.
        moment: The local time; now when not given.

    Returns:
        ``(YYYY-MM-DD, HH-MM-SS-LABEL-xxxx)`` where xxxx is random and hexadecimal.
    """
    moment = moment or datetime.now()
    plain = re.sub(r"[^A-Za-z0-9._+-]", "_", masked(label))[:_MAX_LABEL]
    return moment.strftime("%Y-%m-%d"), f"{moment:%H-%M-%S}-{plain}-{secrets.token_hex(2)}"


def objection(part: str) -> str:
    """Why one part of a name cannot be used, as in ``name {objection}``; empty if it can."""
    if part in ("", ".", ".."):
        return f"has {part!r} as a part of the path"
    if part[0] in "-.":
        return f"has a part that starts with {part[0]!r}"
    if part != part.strip():
        return "has blanks around a part"
    if any(unicodedata.category(character)[0] == "C" or character in "\u2028\u2029" for character in part):
        return "has control characters"
    if len(part.encode()) > MAX_PART_BYTES:
        return f"has a part longer than {MAX_PART_BYTES} bytes"
    return ""
