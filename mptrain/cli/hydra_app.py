"""Display of Hydra's information about the configuration: ``--cfg`` and ``--info``.

Training must not use this module. It calls Hydra's functions instead of ``hydra.main``, because the argument parser of
every released Hydra 1.3 has a help text that is not a string, which Python 3.14 rejects. Hydra's errors are converted
to mptrain's.
"""

from __future__ import annotations

import contextlib
import io
import logging
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra

from mptrain.config.compose import COMPOSITION_ERRORS, Composer
from mptrain.config.value_checks import first_line
from mptrain.system.errors import EXIT_OK, ConfigError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace

#: Overrides that stop Hydra from creating run directories and log files; mptrain creates its own.
_QUIET = (
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra.job.chdir=false",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
)


def show(arguments: Namespace) -> int:
    """Print the information that the options ``--cfg`` or ``--info`` request from Hydra.

    Args:
        arguments: Parsed command line.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: The overrides or the config files are invalid.
        UsageError: The options cannot be combined.
    """
    if (arguments.resolve or arguments.package) and not (arguments.cfg or arguments.info):
        raise UsageError("--resolve and --package require --cfg", "add --cfg job")
    if arguments.multirun or (arguments.cfg and arguments.info):
        raise UsageError("--multirun, --cfg and --info cannot be combined", "use one at a time")
    composer = Composer(arguments.config_dir, arguments.config_name)
    composer.require_keys(arguments.overrides)
    handlers, level = logging.root.handlers[:], logging.root.level
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), composer.opened() as search:
            _answer(arguments, composer.name, [*_QUIET, *arguments.overrides, *search])
    except COMPOSITION_ERRORS as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise ConfigError(first_line(error)) from error
    except SystemExit as leaving:  # raised by show_cfg if the package does not exist
        raise UsageError(stderr.getvalue().strip().rpartition("\n")[2]) from leaving
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    return EXIT_OK


def _answer(arguments: Namespace, name: str, words: list[str]) -> None:
    hydra: Any = GlobalHydra.instance().hydra
    if arguments.cfg:
        hydra.show_cfg(name, words, arguments.cfg, arguments.package, arguments.resolve)
    else:
        hydra.show_info(arguments.info, config_name=name, overrides=words)
