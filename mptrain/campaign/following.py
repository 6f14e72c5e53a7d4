"""A run as ranks other than the first go through it: they hear where it begins, and train along."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.campaign.beginning import Beginning, Outcome, least_micro_batches
from mptrain.config.build import build
from mptrain.engine.loop import Loop
from mptrain.engine.storage import NoStorage
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.layout import RunPaths

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.distributed.ranks import Ranks


def follow(config: Config, ranks: Ranks) -> Outcome:
    """Take part in a run that the first rank keeps: train, evaluate, and write nothing but this rank's parts of tensors.

    Args:
        config: The same as the first rank's.
        ranks: Who they are; this is not the first.

    Raises:
        MptrainError: What ends the run on any rank.
    """
    beginning = ranks.firsts(Beginning())
    if beginning.done is not None:
        return beginning.done
    with ranks.together():
        loaded = CheckpointStore(beginning.manifest.parent, 1).load(beginning.manifest) if beginning.manifest else None
        built = build(config, weights=loaded is None, ranks=ranks, micro_batches=least_micro_batches(config, loaded))
    parts, options = built
    root = ranks.firsts(Path())
    try:
        loop = Loop(parts, options, NoStorage(RunPaths(root)))
        if loaded is not None:
            loop.restore(loaded.state, forgive=beginning.forgive)
    except BaseException as error:  # whoever waits for this rank is to say why it has gone
        ranks.tell_why(error)
        raise
    summary = loop.run()
    loop.require_success()
    return Outcome(root, summary)
