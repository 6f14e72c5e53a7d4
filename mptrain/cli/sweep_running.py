"""Execution of the points (runs) of a sweep: checks them, trains them as ``mptrain KEY=VALUE`` would, displays them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.cli.messages import checking, report, say, warn
from mptrain.cli.sweep_display import print_outcome, watching
from mptrain.config.launcher import Launcher, is_elsewhere, read_launcher
from mptrain.config.trust import command_with, packages_of
from mptrain.sweep.executor import Program
from mptrain.sweep.points import check
from mptrain.sweep.runner import plan_sweep, run_sweep
from mptrain.sweep.slurm_executor import require_scheduler
from mptrain.system.errors import EXIT_OK

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.config.compose import Composer
    from mptrain.config.schema import Config
    from mptrain.runlog.sink import Sink
    from mptrain.runlog.sweeps import Sweep
    from mptrain.sweep.points import Point


def train_in_job(config: Config, sink: Sink) -> None:
    """Train one configuration as a job of a sweep, with the same output as a single run.

    Args:
        config: Configuration of the job.
        sink: Receiver of the run's records in addition to the display.

    Raises:
        MptrainError: The run ends early for any reason.
    """
    from mptrain.cli.train import train
    from mptrain.engine.interrupt import ending_at_once

    warn(config.warnings)
    with ending_at_once():
        train(config, (sink,))


PROGRAM = Program(train_in_job, report, ("torch", "torchvision", "mptrain.cli.train"))


def launcher_of(word: str | None, jobs: int | None) -> Launcher | None:
    """Return where the jobs of a sweep run and what they request, from the options ``--launcher`` and ``--jobs``.

    Args:
        word: Value of ``--launcher``; None for this machine.
        jobs: Value of ``--jobs``, the largest number of jobs queued at a time; None keeps the launcher's.

    Returns:
        The launcher, or None for this machine.

    Raises:
        ConfigError: The file is invalid; the error lists all problems.
        EnvironmentRefused: The scheduler that the file names is not available.
    """
    if word is None:
        return None
    found = read_launcher(word)
    require_scheduler(found)
    return replace(found, at_once=jobs or found.at_once, word=word)


def check_points(
    points: Sequence[Point], composer: Composer, launcher: Launcher | None, said: str = "points valid"
) -> list[Point]:
    """Check the points (runs) of a sweep, print their number, and return them with their configurations.

    Args:
        points: Expanded points.
        composer: Composer of their configurations.
        launcher: Launcher that runs them; None for this machine.
        said: Text printed after the number.

    Raises:
        MptrainError: A point is invalid, cannot be run on this machine, or has incompatible parts.
    """
    with checking(len(points)):
        found = check(points, composer, PROGRAM, elsewhere=is_elsewhere(launcher))
    say(f"{len(found)}/{len(found)} {said}")
    return found


def record_sweep(points: Sequence[Point], folder: Path, arguments: Namespace, **more: Any) -> Sweep:
    """Create a sweep of checked points (runs) and record it as ``sweep.json`` in a folder.

    Args:
        points: Checked points.
        folder: Existing folder of the sweep.
        arguments: Parsed command line.
        more: Further arguments of `mptrain.sweep.runner.plan_sweep`.
    """
    return plan_sweep(
        points,
        folder,
        words=arguments.overrides,
        config_dirs=arguments.config_dir,
        config_name=arguments.config_name,
        parallel=arguments.jobs or 1,
        **more,
    )


def finish(planned: Sweep, composer: Composer, launcher: Launcher | None = None) -> int:
    """Run and display the unfinished jobs of a sweep whose points were checked.

    Args:
        planned: The sweep as recorded in its folder.
        composer: Composer of the jobs' configurations.
        launcher: Launcher that runs the jobs; None for this machine.

    Returns:
        The exit code, as for `mptrain.cli.sweep.sweep`.

    Raises:
        StorageError: Another process runs the sweep, or its folder cannot be written.
    """
    say(f"{planned.kind}={planned.folder}")
    with watching(planned) as watch:
        done, code = run_sweep(planned, composer, PROGRAM, watch, launcher=launcher)
    return show_end(done, code, launcher)


def show_end(done: Sweep, code: int, launcher: Launcher | None = None) -> int:
    """Print the outcome of a sweep and, if it is not complete, the command that runs the rest.

    Args:
        done: The sweep as it ended.
        code: Exit code of the sweep, which is returned unchanged.
        launcher: Launcher of the jobs, repeated in the command; None for this machine.
    """
    if done.kind == "sweep" or code != EXIT_OK:  # a finished comparison prints its verdicts instead
        print_outcome(done)
        if code == EXIT_OK:
            shown = f"mptrain report {shlex.quote(str(done.folder))}"
            say(f"\nreport: {shown}, or of one run: {shown}/RUN")
    if code != EXIT_OK:
        where = f" --launcher {shlex.quote(launcher.word)}" if launcher is not None else ""
        line = f"mptrain resume {shlex.quote(str(done.folder))}{where}"
        say(f"\nto run the rest: {command_with(line, packages_of(done))}")
    return code
