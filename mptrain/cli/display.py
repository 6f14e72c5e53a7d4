"""Chooses how a run is shown: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING

from mptrain.cli.lines import PlainLines
from mptrain.cli.messages import colourful

if TYPE_CHECKING:
    from mptrain.engine.options import LogOptions
    from mptrain.runlog.sink import Sink


def make_display(log: LogOptions, stream: IO[str], title: str = "") -> Sink:
    """The sink that shows a run.

    Args:
        log: How often lines are printed.
        stream: Where to; a terminal that is not ``TERM=dumb`` gets the panel, without colours under NO_COLOR.
        title: What is being trained, for the panel's frame.
    """
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        from mptrain.cli.panel import LivePanel

        return LivePanel(stream, title, colours=colourful(stream))
    return PlainLines(stream, log.lines)
