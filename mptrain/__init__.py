"""Mixed precision training from the command line, with a record of every step's loss scale and overflow.

`mptrain.watch` records the same of a training loop that somebody else wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mptrain.integrations.watch import watch as watch

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import what is used, and torch with it, only then."""
    if name == "watch":
        from mptrain.integrations.watch import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
