"""Running of points of a sweep: they are checked, run as ``mptrain KEY=VALUE`` would run them, and shown."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.cli.command_line import Flags
from mptrain.cli.messages import checking, report, say, warn
from mptrain.cli.sweep_display import print_outcome, watching
from mptrain.config.launcher import Launcher, is_elsewhere, read_launcher
from mptrain.config.trust import allow_argument_for
from mptrain.errors import EXIT_OK
from mptrain.sweep.executor import Program
from mptrain.sweep.points import check
from mptrain.sweep.runner import plan_sweep, run_sweep
from mptrain.sweep.slurm_executor import require_scheduler

if TYPE_CHECKING:
    from mptrain.config.compose import Composer
    from mptrain.config.schema import Config
    from mptrain.runlog.sink import Sink
    from mptrain.runlog.sweeps import Sweep
    from mptrain.sweep.points import Point


def train_in_job(config: Config, sink: Sink) -> None:
    """Train one configuration and print what training it alone would print.

    Args:
        config: Of the job.
        sink: Takes its records besides the display.

    Raises:
        MptrainError: Anything that ends a run before its end.
    """
    from mptrain.cli.train import train
    from mptrain.engine.interrupt import ending_at_once

    warn(config.warnings)
    with ending_at_once():
        train(config, (sink,))


PROGRAM = Program(train_in_job, report, ("torch", "torchvision", "mptrain.cli.train"))


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


def check_points(
    points: Sequence[Point], composer: Composer, launcher: Launcher | None, said: str = "points valid"
) -> list[Point]:
    """Return points that can be run, and print how many they are.

    Args:
        points: As they were expanded.
        composer: Composes them.
        launcher: Where they run; None for this machine.
        said: Words behind their number.

    Raises:
        MptrainError: A point is wrong, cannot be run here, or has parts that do not go together.
    """
    with checking(len(points)):
        found = check(points, composer, PROGRAM, elsewhere=is_elsewhere(launcher))
    say(f"{len(found)}/{len(found)} {said}")
    return found


def record_sweep(points: Sequence[Point], folder: Path, flags: Flags, **more: Any) -> Sweep:
    """Return the sweep of checked points that is on record in a folder from now on.

    Args:
        points: Checked.
        folder: It exists.
        flags: Of the command line that asks for them.
        more: What else `mptrain.sweep.runner.plan_sweep` takes.
    """
    return plan_sweep(
        points,
        folder,
        words=flags.overrides,
        config_dirs=flags.config_dirs,
        config_name=flags.config_name,
        parallel=flags.jobs or 1,
        **more,
    )


def finish(planned: Sweep, composer: Composer, launcher: Launcher | None = None) -> int:
    """Run what is not done of a sweep whose points were checked, and shows it.

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
    """Print what came of a sweep, and how to run the rest of it where there is one; return the code."""
    if done.kind == "sweep" or code != EXIT_OK:  # what came of a comparison is said by its verdicts
        print_outcome(done)
    if code != EXIT_OK:
        where = f" --launcher {shlex.quote(launcher.word)}" if launcher is not None else ""
        say(f"\nto run the rest: mptrain resume {shlex.quote(str(done.folder))}{where}{allow_argument_for(done)}")
    return code
