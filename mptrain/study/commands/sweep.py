"""``mptrain -m`` and ``mptrain resume SWEEP``: check, train and display the points (runs) of a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.cli.messages import each_warning_once, report, say, waiting, warn
from mptrain.config.compose import Composer, command_with, packages_of, untrusted_code
from mptrain.config.launcher import Launcher, read_launcher
from mptrain.runlog.sweeps import Sweep, is_sweep, read_sweep, summary_of
from mptrain.study.commands.sweep_display import print_outcome, watching
from mptrain.study.comparison.ranking import selected
from mptrain.study.sweep.executor import Program
from mptrain.study.sweep.points import Point, check, expand
from mptrain.study.sweep.runner import missing_points, plan_sweep, refresh_status, require_free, run_sweep, sweep_folder
from mptrain.study.sweep.slurm_executor import require_scheduler
from mptrain.system.errors import (
    EXIT_DATA,
    EXIT_OK,
    ConfigError,
    UsageError,
)
from mptrain.system.words import counted

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.config.schema import Config
    from mptrain.runlog.record_writer import Sink


def sweep(arguments: Namespace) -> int:
    """Train all combinations of the values on a command line, such as ``seed=0,1 scaler.scale=8,128``.

    All of these points (one run each) are checked before the first one starts.

    Args:
        arguments: Parsed command line.

    Returns:
        0; 7 if a job failed; 130 or 75 if a signal ended the sweep.

    Raises:
        MptrainError: A point is invalid, cannot be run on this machine, or has incompatible parts; nothing is run then.
            Or the sweep's folder cannot be created or written.
    """
    with each_warning_once():
        composer = Composer(arguments.config_dir, arguments.config_name)
        points = expand(arguments.overrides, composer.catalogue)
        launcher = launcher_of(arguments.launcher, arguments.jobs)
        points = check_points(points, composer, launcher)
        warn(sentence for point in points for sentence in point.warnings)
        first = points[0].config
        assert first is not None
        planned = record_sweep(points, sweep_folder(first.run), arguments, plan=objective_of(arguments))
        return finish(planned, composer, launcher)


def find_sweep(path: str, overrides: Sequence[str], jobs: int | None, launcher: str | None = None) -> Sweep | None:
    """Return the sweep that ``mptrain resume PATH`` names, or None if the path names a run.

    Args:
        path: A folder, a name under ``outputs``, or ``last``, which always means a run.
        overrides: Overrides of the command; must be empty for a sweep.
        jobs: Value of ``--jobs``; must be None for a run.
        launcher: Value of ``--launcher``; must be None for a run.

    Raises:
        UsageError: ``KEY=VALUE`` is given for a sweep, or one of the flags for a run.
        StorageError: ``sweep.json`` is damaged.
    """
    candidates = (Path(path), Path("outputs") / path)
    folder = None if path == "last" else next((candidate for candidate in candidates if is_sweep(candidate)), None)
    if folder is None:
        for flag, value in (("--jobs", jobs), ("--launcher", launcher)):
            if value is not None:
                raise UsageError(f"{flag} applies only to sweeps, and {path} is not a sweep", f"remove {flag}")
        return None
    sweep = read_sweep(folder)
    if overrides:
        one_run = f"mptrain resume {shlex.quote(str(folder))}/RUN {shlex.join(overrides)}"
        raise UsageError(
            f"{folder} is a sweep and resumes with its own configuration: {overrides[0]} cannot change",
            f"change one run: {command_with(one_run, packages_of(sweep))}; or start a new sweep with -m",
        )
    return sweep


def resume_sweep(sweep: Sweep, jobs: int | None, allow: Sequence[str] = (), launcher: str | None = None) -> int:
    """Run the missing, failed and interrupted jobs of a sweep, with the configuration in ``sweep.json`` only.

    Args:
        sweep: The sweep as read from its folder.
        jobs: Number of jobs at a time; None keeps the recorded number.
        allow: Packages that the command allows (``extensions.allow``).
        launcher: Value of ``--launcher``; None runs the jobs on this machine. The launcher of an earlier attempt is not
            reused.

    Returns:
        The exit code, as for `sweep`.

    Raises:
        MptrainError: As for `sweep`; or the jobs allow packages that the command does not.
    """
    with each_warning_once():
        require_free(sweep)
        sweep = refresh_status(replace(sweep, parallel=jobs or sweep.parallel))
        composer = Composer(sweep.config_dirs, sweep.config_name, typed=())
        missing = missing_points(sweep)
        asked = launcher_of(launcher, jobs) if missing else None
        if missing:
            _require_trust(sweep, allow)
            warn(f"{sweep.paths.json} loads config files from --config-dir {folder}" for folder in sweep.config_dirs)
            check_points(
                missing, composer, asked, f"missing points valid, {len(sweep.jobs) - len(missing)} done before"
            )
        else:
            say(f"{sweep.folder} is already done")
        if has_sweeper(sweep.words):
            say("only the points recorded in sweep.json are run; the sweeper is not called again")
        code = finish(sweep, composer, asked)
    if sweep.kind == "recipe" and code == EXIT_OK:
        say(f"\nto check its expectations: mptrain reproduce {sweep.plan.get('recipe', 'RECIPE')}")
    return code


def _require_trust(sweep: Sweep, allow: Sequence[str]) -> None:
    """Check the packages that ``sweep.json`` allows against those of the command, because the file is untrusted.

    Raises:
        ConfigError: The file allows packages that the command does not.
    """
    packages = packages_of(sweep)
    if not set(packages) <= set(allow):
        raise ConfigError(
            untrusted_code(str(sweep.paths.json), packages, f"mptrain resume {shlex.quote(str(sweep.folder))}")
        )


def objective_of(arguments: Namespace) -> dict[str, str]:
    """Return what the plan of a sweep has of the metric by which its points are chosen, from ``--objective``.

    Args:
        arguments: Parsed command line.
    """
    return {"objective": arguments.objective} if arguments.objective else {}


def has_sweeper(words: Sequence[str]) -> bool:
    """Return whether a sweep's overrides select or configure a Hydra sweeper (such as Optuna) to choose the points.

    Args:
        words: The overrides as text.
    """
    keys = [word.partition("=")[0].lstrip("+~") for word in words]
    return any(key == "hydra/sweeper" or key.startswith("hydra.sweeper.") for key in keys)


def train_in_job(config: Config, sink: Sink) -> None:
    """Train one configuration as a job of a sweep, with the same output as a single run.

    Args:
        config: Configuration of the job.
        sink: Receiver of the run's records in addition to the display.

    Raises:
        MptrainError: The run ends early for any reason.
    """
    from mptrain.cli.train import train
    from mptrain.engine.interrupt import end_at_signals

    warn(config.warnings)
    with end_at_signals():
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
    launcher = read_launcher(word)
    require_scheduler()
    return replace(launcher, at_once=jobs or launcher.at_once, word=word)


def check_points(
    points: Sequence[Point], composer: Composer, launcher: Launcher | None, suffix: str = "points valid"
) -> list[Point]:
    """Check the points (runs) of a sweep, print their number, and return them with their configurations.

    Args:
        points: Expanded points.
        composer: Composer of their configurations.
        launcher: Launcher that runs them; None for this machine.
        suffix: Text printed after the number.

    Raises:
        MptrainError: A point is invalid, cannot be run on this machine, or has incompatible parts.
    """
    with waiting() as tell:
        tell(f"checking {counted(len(points), 'point')}")
        checked = check(points, composer, PROGRAM, elsewhere=launcher is not None)
    say(f"{len(checked)}/{len(checked)} {suffix}")
    return checked


def record_sweep(points: Sequence[Point], folder: Path, arguments: Namespace, **more: Any) -> Sweep:
    """Create a sweep of checked points (runs) and record it as ``sweep.json`` in a folder.

    Args:
        points: Checked points.
        folder: Existing folder of the sweep.
        arguments: Parsed command line.
        more: Further arguments of `mptrain.study.sweep.runner.plan_sweep`.
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
        The exit code, as for `sweep`.

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
        code: Exit code of the sweep, which is returned; 6 instead of 0 if no point has the metric of ``--objective``.
        launcher: Launcher of the jobs, repeated in the command; None for this machine.
    """
    if done.kind == "sweep" or code != EXIT_OK:  # a finished comparison prints its verdicts instead
        print_outcome(done)
        if code == EXIT_OK:
            shown = f"mptrain report {shlex.quote(str(done.folder))}"
            say(f"\nreport: {shown}, or of one run: {shown}/RUN")
        finals = [selected(done, summary_of(done.paths.run(job.name))).get("metric") for job in done.jobs]
        if code == EXIT_OK and "objective" in done.plan and all(final is None for final in finals):
            return EXIT_DATA  # nothing could be chosen by what was asked for
    if code != EXIT_OK:
        where = f" --launcher {shlex.quote(launcher.word)}" if launcher is not None else ""
        line = f"mptrain resume {shlex.quote(str(done.folder))}{where}"
        say(f"\nto run the rest: {command_with(line, packages_of(done))}")
    return code
