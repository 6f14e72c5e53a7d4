"""Connection of a run to its experiment tracker, which runs in a separate process (`mptrain.logger`)."""

from __future__ import annotations

from collections.abc import Sequence

from mptrain.config.schema import Config
from mptrain.logger import Logger, NoLogger, TrackedRun, TrackerProcess
from mptrain.runlog import RunDirectory
from mptrain.runlog.record_writer import Fanout, Sink
from mptrain.system.errors import ConfigError, MptrainError


def require_logger(config: Config) -> None:
    """Check that the experiment tracker of a run can be used. Call it before anything is written.

    Raise ConfigError if the tracker's package is missing, or the object is not a tracker of mptrain.
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
    except Exception as error:  # a user's tracker may raise anything
        raise ConfigError(f"{config.logger.path} cannot be used: {type(error).__name__}: {error}") from error


def track(config: Config, directory: RunDirectory, name: str, from_step: int, others: Sequence[Sink]) -> list[Sink]:
    """Start the experiment tracker of a run in its own process, and return the sink that passes records to it.

    The result is a list with the sink; empty if the run has no tracker. ``from_step`` is the number of training steps
    attempted before this start or resume. The sinks ``others`` receive a warning if the tracker fails.
    """
    logger: Logger | NoLogger = config.logger.build()
    if isinstance(logger, NoLogger):
        return []
    paths = directory.paths
    run = TrackedRun(name, paths.root.absolute(), paths.samples.absolute(), config.tree, from_step)
    return [TrackerProcess(logger, run, paths.logger_log, Fanout(others))]
