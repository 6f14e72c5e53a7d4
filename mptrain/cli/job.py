"""What the jobs of a sweep run: the same as ``mptrain KEY=VALUE``, in the process that `mptrain.sweep.local_executor` gives them.

Must not import torch before a function here is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mptrain.cli.messages import report, warn
from mptrain.sweep.executor import Program

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.runlog.sink import Sink


def train_in_job(config: Config, sink: Sink) -> None:
    """Train one configuration and print what training it alone would print.

    Args:
        config: Of the job.
        sink: Takes its records besides the display.

    Raises:
        MptrainError: Anything that ends a run before its end.
    """
    from mptrain.cli.train import train
    from mptrain.engine.interrupt import ending_at_once

    warn(config.warnings)
    with ending_at_once():
        train(config, (sink,))


PROGRAM = Program(train_in_job, report, ("torch", "torchvision", "mptrain.cli.train"))
