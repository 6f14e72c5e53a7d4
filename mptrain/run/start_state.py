"""What every rank knows of a run: where it begins, in how many micro-batches, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.runlog.checkpoints import Loaded


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


def least_micro_batches(config: Config, loaded: Loaded | None) -> int:
    """The least number of micro-batches of an update: as many as before, so that none needs more memory, at any number of ranks.

    Where ``train.accumulate`` was changed on purpose, that is what counts.
    """
    saved = loaded.state if loaded is not None else {}
    found = saved.get("micro_batches") if saved.get("accumulate") == config.train.accumulate else 1
    return found if isinstance(found, int) and 1 <= found <= config.train.batch_size else 1
