"""Hands a command line to Hydra where Hydra is asked to show something: ``--cfg``, ``--info``.

Training never goes through here. Hydra's errors come out as ours.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import hydra

from mptrain.config import location
from mptrain.config.compose import COMPOSITION_ERRORS, Composer
from mptrain.config.overrides import read
from mptrain.config.ranges import first_line
from mptrain.errors import EXIT_OK, ConfigError, UsageError

if TYPE_CHECKING:
    from mptrain.cli.flags import Flags

#: We alone make run directories and log files.
_QUIET = (
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra.job.chdir=false",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
)


def show(flags: Flags) -> int:
    """Lets Hydra answer.

    Args:
        flags: The words of the command line, sorted.

    Raises:
        ConfigError: The overrides are wrong, or the files are.
        UsageError: Hydra does not understand its own flags so.
    """
    if len(flags.config_dirs) > 1:
        raise UsageError("--cfg and --info take one --config-dir only")
    composer = Composer(flags.config_dirs, flags.config_name)
    if not flags.multirun:
        problems = read(flags.overrides, composer.catalogue).problems
        if problems:
            raise ConfigError(problems)
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    handlers, level = logging.root.handlers[:], logging.root.level
    # Overrides stand together, before the flags: Hydra's parser takes one stretch of them only.
    sys.argv = ["mptrain", *_QUIET, *flags.overrides, *flags.given]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing and leaving
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            hydra.main(version_base="1.3", config_path=str(location.configs()), config_name="train")(_nothing)()
    except COMPOSITION_ERRORS as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise ConfigError(first_line(error)) from error
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            last = said.getvalue().strip().rpartition("\n")[2]
            raise UsageError(last or "Hydra does not understand these words") from leaving
    finally:
        sys.argv = before
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
    return EXIT_OK


def _nothing(_: Any) -> None:
    """Hydra wants something to run; with these flags it does not run it."""
