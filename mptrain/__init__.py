"""Mixed precision training from the command line, with a record of every step's loss scale and overflow.

`mptrain.watch` records the same of a training loop that somebody else wrote.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

#: Functions for Python programs, and their modules, which are imported when they are used.
_FUNCTIONS = {"watch": "mptrain.integrations.watch"}


def __getattr__(name: str) -> Any:
    """Return a function for Python programs."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
