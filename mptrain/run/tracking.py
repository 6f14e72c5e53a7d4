"""Ties a run to its experiment tracker, in a process beside the training (`mptrain.logger`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from omegaconf import OmegaConf

from mptrain.config.schema import Config
from mptrain.errors import ConfigError, MptrainError
from mptrain.logger import Logger, NoLogger, TrackedRun, TrackerProcess
from mptrain.runlog import RunDirectory
from mptrain.runlog.sink import Fanout, Sink


def require_logger(config: Config) -> None:
    """Refuse a tracker that cannot be used; to be called before anything is written.

    Raises:
        ConfigError: Its package is missing, or it is no tracker of mptrain.
    """
    logger = config.logger.build()
    if not (hasattr(logger, "require") and hasattr(logger, "open")) and not isinstance(logger, NoLogger):
        raise ConfigError(
            f"{config.logger.path} is not a tracker of mptrain: it has no require() or no open()",
            "choose one of mptrain list logger",
        )
    try:
        logger.require()
    except MptrainError:
        raise
    except Exception as error:  # a tracker of the user's may raise anything
        raise ConfigError(f"{config.logger.path} cannot be used: {type(error).__name__}: {error}") from error


def track(config: Config, directory: RunDirectory, name: str, from_step: int, others: Sequence[Sink]) -> list[Sink]:
    """The sink of the run's tracker; none where it has no tracker.

    Args:
        config: Of the run.
        directory: Of the run.
        name: Of the run, for people.
        from_step: Steps that it goes on from.
        others: Where the warning goes if the tracker fails.
    """
    logger: Logger | NoLogger = config.logger.build()
    if isinstance(logger, NoLogger):
        return []
    paths = directory.paths
    tree = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(config.yaml)))
    run = TrackedRun(name, paths.root.absolute(), paths.samples.absolute(), tree, from_step)
    return [TrackerProcess(logger, run, paths.logger_log, Fanout(others))]
