"""Which loops there are, and how to make one that may not be installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util

from benchmarks.loops.base import Loop, Mode, Work

Made = Callable[[Work, Mode], Loop]


@dataclass(frozen=True)
class Peer:
    """Another framework's loop.

    Attributes:
        name: In results.
        package: What must be installed.
        path: Module and class in `benchmarks.loops`.
    """

    name: str
    package: str
    path: tuple[str, str]

    def make(self, work: Work, mode: Mode) -> Loop:
        """The loop.

        Raises:
            NotThere: The package is not installed, or refuses this work.
        """
        if util.find_spec(self.package) is None:
            raise NotThere(f"{self.package} is not installed: pip install -e '.[bench]'")
        module, name = self.path
        try:
            made: Loop = getattr(importlib.import_module(f"benchmarks.loops.{module}"), name)(work, mode)
        except (ValueError, RuntimeError, ImportError) as error:
            raise NotThere(f"{self.package} refuses: {str(error).splitlines()[0]}") from error
        return made


class NotThere(Exception):
    """A peer cannot take part; the message says why."""


PEERS = (
    Peer("fabric", "lightning", ("fabric", "Fabric")),
    Peer("accelerate", "accelerate", ("accelerate", "Accelerate")),
    Peer("timm", "timm", ("timm", "Timm")),
    Peer("lightning", "lightning", ("lightning", "Lightning")),
)
