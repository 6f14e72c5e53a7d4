"""``mptrain -m`` and ``mptrain resume SWEEP``: checks every point, runs them, prints a table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mptrain.cli.command_line import Flags
from mptrain.cli.messages import each_warning_once, say, warn
from mptrain.cli.sweep_running import check_points, finish, launcher_of, record_sweep
from mptrain.config.compose import Composer
from mptrain.config.trust import allow_argument_for, allowed_packages, untrusted_code
from mptrain.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, ConfigError, UsageError
from mptrain.runlog.sweeps import Sweep, is_sweep, read_sweep
from mptrain.sweep.points import expand
from mptrain.sweep.runner import missing_points, refresh_status, require_free, sweep_folder


def sweep(flags: Flags) -> int:
    """Run all combinations of a command line's values.

    Returns:
        0; 7 where a job failed; 130 or 75 where a signal ended the sweep.

    Raises:
        MptrainError: A point is wrong, cannot be run here, or has parts that do not go together: then none is run. Or
            the sweep's folder cannot be made or written.
    """
    if has_sweeper(flags.overrides):
        from mptrain.cli.sweeper_search import search

        return search(flags)
    with each_warning_once():
        composer = Composer(flags.config_dirs, flags.config_name)
        points = expand(flags.overrides, composer.catalogue)
        launcher = launcher_of(flags.launcher, flags.jobs)
        points = check_points(points, composer, launcher)
        warn(sentence for point in points for sentence in point.warnings)
        first = points[0].config
        assert first is not None
        planned = record_sweep(points, sweep_folder(first.run), flags)
        return finish(planned, composer, launcher)


def find_sweep(path: str, overrides: Sequence[str], jobs: int | None, launcher: str | None = None) -> Sweep | None:
    """Return the sweep that ``mptrain resume PATH`` means; None where it means a run.

    Args:
        path: A folder, a name below ``outputs``, or ``last``, which is a run always.
        overrides: Must be empty for a sweep.
        jobs: Of ``--jobs``; must be None for a run.
        launcher: Of ``--launcher``; must be None for a run.

    Raises:
        UsageError: ``KEY=VALUE`` for a sweep, or one of these flags for a run.
        StorageError: ``sweep.json`` is damaged.
    """
    places = (Path(path), Path("outputs") / path)
    folder = None if path == "last" else next((place for place in places if is_sweep(place)), None)
    if folder is None:
        for flag, value in (("--jobs", jobs), ("--launcher", launcher)):
            if value is not None:
                raise UsageError(f"{flag} is about the points of a sweep, and {path} is none", "leave it out")
        return None
    found = read_sweep(folder)
    if overrides:
        raise UsageError(
            f"{folder} is a sweep, and goes on as it was started: {overrides[0]} cannot change",
            f"change one run: mptrain resume {shlex.quote(str(folder))}/RUN {shlex.join(overrides)}{allow_argument_for(found)}; or start a sweep with -m",
        )
    return found


def resume_sweep(found: Sweep, jobs: int | None, allow: Sequence[str] = (), launcher: str | None = None) -> int:
    """Run what is missing, failed or interrupted of a sweep, by what ``sweep.json`` says alone.

    Args:
        found: As it was read.
        jobs: Jobs at a time; None takes as many as before.
        allow: Packages whose code was let in with the command.
        launcher: Of ``--launcher``: what ran before says nothing of where the rest runs.

    Returns:
        As `sweep`.

    Raises:
        MptrainError: As `sweep`; or its jobs let in other code.
    """
    with each_warning_once():
        require_free(found)
        found = refresh_status(replace(found, parallel=jobs or found.parallel))
        composer = Composer(found.config_dirs, found.config_name, typed=())
        missing = missing_points(found)
        asked = launcher_of(launcher, jobs) if missing else None
        if missing:
            _require_trust(found, allow)
            warn(f"{found.paths.json} brings its own files along: --config-dir {one}" for one in found.config_dirs)
            check_points(
                missing, composer, asked, f"missing points valid, {len(found.jobs) - len(missing)} done before"
            )
        else:
            say(f"{found.folder} is already done")
        if has_sweeper(found.words):
            say("these are the points that its sweeper asked for; it is not asked for more")
        code = finish(found, composer, asked)
    if found.kind == "comparison" and code not in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
        from mptrain.cli.compare import conclude

        conclude(found)
    elif found.kind == "recipe" and code == EXIT_OK:
        say(f"\nto judge it: mptrain reproduce {found.plan.get('recipe', 'RECIPE')}")
    return code


def _require_trust(sweep: Sweep, allow: Sequence[str]) -> None:
    """Refuse the words of ``sweep.json`` about whose code may be called: it may come from somebody else than who resumes it.

    Raises:
        ConfigError: They let in what the command does not.
    """
    packages = allowed_packages(word for job in sweep.jobs for word in job.overrides)
    if not set(packages) <= set(allow):
        raise ConfigError(
            untrusted_code(str(sweep.paths.json), packages, f"mptrain resume {shlex.quote(str(sweep.folder))}")
        )


def has_sweeper(words: Sequence[str]) -> bool:
    """Return whether the words of a sweep leave its points to a sweeper of Hydra's."""
    keys = [word.partition("=")[0].lstrip("+~") for word in words]
    return any(key == "hydra/sweeper" or key.startswith("hydra.sweeper.") for key in keys)
