"""``mptrain -m`` and ``mptrain resume SWEEP``: checks all points (runs) of a sweep, runs them and prints a table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.messages import each_warning_once, say, warn
from mptrain.cli.sweep_running import check_points, finish, launcher_of, record_sweep
from mptrain.config.compose import Composer
from mptrain.config.trust import command_with, packages_of, untrusted_code
from mptrain.runlog.sweeps import Sweep, is_sweep, read_sweep
from mptrain.sweep.points import expand
from mptrain.sweep.runner import missing_points, refresh_status, require_free, sweep_folder
from mptrain.system.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, ConfigError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace


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
    if has_sweeper(arguments.overrides):
        from mptrain.cli.sweeper_search import search

        return search(arguments)
    with each_warning_once():
        composer = Composer(arguments.config_dir, arguments.config_name)
        points = expand(arguments.overrides, composer.catalogue)
        launcher = launcher_of(arguments.launcher, arguments.jobs)
        points = check_points(points, composer, launcher)
        warn(sentence for point in points for sentence in point.warnings)
        first = points[0].config
        assert first is not None
        planned = record_sweep(points, sweep_folder(first.run), arguments)
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
    places = (Path(path), Path("outputs") / path)
    folder = None if path == "last" else next((place for place in places if is_sweep(place)), None)
    if folder is None:
        for flag, value in (("--jobs", jobs), ("--launcher", launcher)):
            if value is not None:
                raise UsageError(f"{flag} applies only to sweeps, and {path} is not a sweep", f"remove {flag}")
        return None
    found = read_sweep(folder)
    if overrides:
        one_run = f"mptrain resume {shlex.quote(str(folder))}/RUN {shlex.join(overrides)}"
        raise UsageError(
            f"{folder} is a sweep and resumes with its own configuration: {overrides[0]} cannot change",
            f"change one run: {command_with(one_run, packages_of(found))}; or start a new sweep with -m",
        )
    return found


def resume_sweep(found: Sweep, jobs: int | None, allow: Sequence[str] = (), launcher: str | None = None) -> int:
    """Run the missing, failed and interrupted jobs of a sweep, with the configuration in ``sweep.json`` only.

    Args:
        found: The sweep as read from its folder.
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
        require_free(found)
        found = refresh_status(replace(found, parallel=jobs or found.parallel))
        composer = Composer(found.config_dirs, found.config_name, typed=())
        missing = missing_points(found)
        asked = launcher_of(launcher, jobs) if missing else None
        if missing:
            _require_trust(found, allow)
            warn(f"{found.paths.json} loads config files from --config-dir {one}" for one in found.config_dirs)
            check_points(
                missing, composer, asked, f"missing points valid, {len(found.jobs) - len(missing)} done before"
            )
        else:
            say(f"{found.folder} is already done")
        if has_sweeper(found.words):
            say("only the points recorded in sweep.json are run; the sweeper is not called again")
        code = finish(found, composer, asked)
    if found.kind == "comparison" and code not in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
        from mptrain.cli.compare import conclude

        conclude(found)
    elif found.kind == "recipe" and code == EXIT_OK:
        say(f"\nto check its expectations: mptrain reproduce {found.plan.get('recipe', 'RECIPE')}")
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


def has_sweeper(words: Sequence[str]) -> bool:
    """Return whether a sweep's overrides select or configure a Hydra sweeper (such as Optuna) to choose the points.

    Args:
        words: The overrides as text.
    """
    keys = [word.partition("=")[0].lstrip("+~") for word in words]
    return any(key == "hydra/sweeper" or key.startswith("hydra.sweeper.") for key in keys)
