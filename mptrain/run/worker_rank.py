"""A run as ranks other than the first go through it: they hear where it begins, and train along."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.config.build import build
from mptrain.engine.loop import Loop
from mptrain.engine.storage import NoStorage
from mptrain.run.start_state import Beginning, Outcome, least_micro_batches
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.layout import RunPaths

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.parallel.communicator import Communicator


def follow(config: Config, comm: Communicator) -> Outcome:
    """Take part in a run that the first rank keeps: train, evaluate, and write nothing but this rank's parts of tensors.

    Args:
        config: The same as the first rank's.
        comm: Who they are; this is not the first.

    Raises:
        MptrainError: What ends the run on any rank.
    """
    beginning = comm.broadcast_object(Beginning())
    if beginning.done is not None:
        return beginning.done
    with comm.together():
        loaded = CheckpointStore(beginning.manifest.parent, 1).load(beginning.manifest) if beginning.manifest else None
        built = build(config, weights=loaded is None, comm=comm, micro_batches=least_micro_batches(config, loaded))
    parts, options = built
    root = comm.broadcast_object(Path())
    try:
        loop = Loop(parts, options, NoStorage(RunPaths(root)))
        if loaded is not None:
            loop.checkpointing.restore(loaded.state, forgive=beginning.forgive)
    except BaseException as error:  # whoever waits for this rank is to say why it has gone
        comm.tell_why(error)
        raise
    summary = loop.run()
    loop.require_success()
    return Outcome(root, summary)
