"""Runs the points of a sweep that were checked, and shows how it goes and how it ended."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from mptrain.cli.job import PROGRAM
from mptrain.cli.messages import say
from mptrain.cli.sweep_outcome import print_outcome
from mptrain.cli.sweep_watch import watching
from mptrain.config.launcher import Launcher, read_launcher
from mptrain.config.trust import retyped_for
from mptrain.errors import EXIT_OK
from mptrain.sweep.runner import run_sweep
from mptrain.sweep.scheduler_executor import require_scheduler

if TYPE_CHECKING:
    from mptrain.config.compose import Composer
    from mptrain.runlog.sweeps import Sweep


def launcher_of(word: str | None, jobs: int | None) -> Launcher | None:
    """Return what ``--launcher`` means, with as many jobs in the queue as ``--jobs`` says; None for this machine.

    Raises:
        ConfigError: With everything that is wrong with the file.
        EnvironmentRefused: The scheduler that it names is not here.
    """
    if word is None:
        return None
    found = read_launcher(word)
    require_scheduler(found)
    return replace(found, at_once=jobs or found.at_once, word=word)


def finish(planned: Sweep, composer: Composer, launcher: Launcher | None = None) -> int:
    """Runs what is not done of a sweep whose points were checked, and shows it.

    Returns:
        As `mptrain.cli.sweep.sweep`.

    Raises:
        StorageError: Somebody else runs it, or the disk refuses.
    """
    say(f"{planned.kind}={planned.folder}")
    with watching(planned) as watch:
        done, code = run_sweep(planned, composer, PROGRAM, watch, launcher=launcher)
    return show_end(done, code, launcher)


def show_end(done: Sweep, code: int, launcher: Launcher | None = None) -> int:
    """Prints what came of a sweep, and how to run the rest of it where there is one; returns the code."""
    if done.kind == "sweep" or code != EXIT_OK:  # what came of a comparison is said by its verdicts
        print_outcome(done)
    if code != EXIT_OK:
        where = f" --launcher {shlex.quote(launcher.word)}" if launcher is not None else ""
        say(f"\nto run the rest: mptrain resume {shlex.quote(str(done.folder))}{where}{retyped_for(done)}")
    return code
