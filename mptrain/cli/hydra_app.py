"""Lets Hydra show something: ``--cfg``, ``--info``, ``--hydra-help``.

Training never goes through here. Hydra is asked by its own functions, not by ``hydra.main``: the argument parser of every released
Hydra 1.3 has a help text that is no string, which Python 3.14 refuses. Hydra's errors come out as ours.
"""

from __future__ import annotations

import contextlib
import io
import logging
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from mptrain.cli.flags import INFO, Flags, is_asked_of_info
from mptrain.config.compose import COMPOSITION_ERRORS, Composer
from mptrain.config.ranges import first_line
from mptrain.errors import EXIT_OK, ConfigError, UsageError

#: We alone make run directories and log files.
_QUIET = (
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra.job.chdir=false",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
)


@dataclass
class _Asked:
    """The flags by which Hydra is asked.

    Attributes:
        cfg: Which configuration to show; empty for none.
        package: The part of it to show.
        resolve: With its interpolations resolved.
        info: What to tell of how it is composed; empty for nothing.
        help: Hydra's own help.
    """

    cfg: str = ""
    package: str | None = None
    resolve: bool = False
    info: str = ""
    help: bool = False


def show(flags: Flags) -> int:
    """Let Hydra answer.

    Args:
        flags: The words of the command line, sorted.

    Raises:
        ConfigError: The overrides are wrong, or the files are.
        UsageError: The flags do not go together.
    """
    asked = _asked(flags)
    composer = Composer(flags.config_dirs, flags.config_name)
    composer.require_keys(flags.overrides)
    handlers, level = logging.root.handlers[:], logging.root.level
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), composer.opened() as search:
            _answer(asked, composer.name, [*_QUIET, *flags.overrides, *search])
    except COMPOSITION_ERRORS as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise ConfigError(first_line(error)) from error
    except SystemExit as leaving:  # of show_cfg, where there is no such package
        raise UsageError(said.getvalue().strip().rpartition("\n")[2]) from leaving
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    return EXIT_OK


def _answer(asked: _Asked, name: str, words: Sequence[str]) -> None:
    hydra: Any = GlobalHydra.instance().hydra
    if asked.cfg:
        hydra.show_cfg(name, list(words), asked.cfg, asked.package, asked.resolve)
    elif asked.info:
        hydra.show_info(asked.info, config_name=name, overrides=list(words))
    else:
        hydra.hydra_help(name, args_parser=_parser_of_hydra(), args=Namespace(overrides=list(words)))


def _parser_of_hydra() -> Any:
    from hydra._internal.utils import get_args_parser

    try:
        return get_args_parser()
    except ValueError as error:
        raise UsageError(
            "--hydra-help: this release of Hydra cannot describe its flags on Python 3.14 and later",
            "mptrain --help lists those that work here",
        ) from error


def _asked(flags: Flags) -> _Asked:
    """Return what the flags ask.

    Raises:
        UsageError: They do not go together.
    """
    asked, rest = _Asked(), list(flags.given)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag in ("--cfg", "-c"):
            asked.cfg = value if equals else rest.pop(0)
        elif flag in ("--package", "-p"):
            asked.package = value if equals else rest.pop(0)
        elif flag in ("--info", "-i"):
            asked.info = value if equals else rest.pop(0) if rest and is_asked_of_info(rest[0]) else "all"
        elif flag == "--resolve":
            asked.resolve = True
        elif flag == "--hydra-help":
            asked.help = True
    if asked.info and asked.info not in INFO:
        raise UsageError(f"--info {asked.info}: there is no such information", f"it shows {', '.join(INFO)}")
    if (asked.resolve or asked.package) and not (asked.cfg or asked.info or asked.help):
        raise UsageError("--resolve and --package are about --cfg", "add --cfg job")
    if flags.multirun or sum([bool(asked.cfg), bool(asked.info), asked.help]) != 1:
        raise UsageError("only one of --multirun, --cfg, --info and --hydra-help can be asked for", "ask one by one")
    return asked
