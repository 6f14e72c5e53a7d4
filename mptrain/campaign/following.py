"""A run as ranks other than the first go through it: they hear where it begins, and train along."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.config.build import build
from mptrain.engine.loop import Loop
from mptrain.engine.storage import NoStorage
from mptrain.runlog.checkpoints import CheckpointStore, Loaded
from mptrain.runlog.layout import RunPaths

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.distributed.ranks import Ranks


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended in order.

    Attributes:
        root: The run directory.
        summary: The final numbers.
        already_done: The run was finished before; nothing was trained.
    """

    root: Path
    summary: dict[str, Any]
    already_done: bool = False


@dataclass(frozen=True)
class Beginning:
    """What the first rank tells the others before they build.

    Attributes:
        manifest: Of the checkpoint to go on from; None begins at the beginning.
        forgive: Count refused steps in a row anew.
        done: How the run has ended before, where there is nothing to do.
    """

    manifest: Path | None = None
    forgive: bool = False
    done: Outcome | None = None


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
    loop = Loop(parts, options, NoStorage(RunPaths(root)))
    if loaded is not None:
        loop.restore(loaded.state, forgive=beginning.forgive)
    summary = loop.run()
    loop.require_success()
    return Outcome(root, summary)


def least_micro_batches(config: Config, loaded: Loaded | None) -> int:
    """The least number of micro-batches of an update: as many as before, so that none needs more memory, at any number of ranks.

    Where ``train.accumulate`` was changed on purpose, that is what counts.
    """
    saved = loaded.state if loaded is not None else {}
    found = saved.get("micro_batches") if saved.get("accumulate") == config.train.accumulate else 1
    return found if isinstance(found, int) and 1 <= found <= config.train.batch_size else 1
