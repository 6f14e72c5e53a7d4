"""Reading of ``--launcher``: ``slurm``, or a YAML file that says what the jobs of a sweep ask Slurm for.

The file may be untrusted, and submitit writes its values into a shell script. So only the keys below are accepted. None
of them is a command (submitit's ``setup``, ``python`` and ``srun_args`` are), and a text value cannot contain a blank,
a quote or a line end.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import StringConstraints

from mptrain.config.value_checks import check_section
from mptrain.config.yaml_files import find_unreadable, read_yaml
from mptrain.system.errors import ConfigError, Problem
from mptrain.system.fields import NonNegativeInt, PositiveFloat, PositiveInt, RangeDescription

Word = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:=+@&|*()\[\]-]*$", max_length=200),
    RangeDescription("letters, digits and _.,:=+@&|*()[]-, without blanks"),
]

#: Largest size of a launcher file, in bytes.
_LARGEST = 100_000

#: Keys of submitit that run commands.
_COMMANDS = ("setup", "teardown", "python", "srun_args", "additional_parameters")


@dataclass(frozen=True)
class LauncherFile:
    """Content of a launcher file: the resources of each job of a sweep.

    The attributes from ``partition`` to ``comment`` are options of ``sbatch``.

    Attributes:
        executor: ``slurm``, the only one.
        timeout_min: Time limit in minutes; an unfinished job saves a checkpoint, is queued again and resumes.
        signal_delay_s: Seconds before the time limit at which a job starts to save.
        mem_gb: Memory in gigabytes; None uses Slurm's default.
        cpus_per_task: Number of CPU cores; None uses Slurm's default.
        at_once: Largest number of jobs queued at a time, which ``--jobs N`` overrides; None means all.
        job_name: Name that ``squeue`` shows.
    """

    executor: Literal["slurm"] = "slurm"
    timeout_min: PositiveInt = 60
    signal_delay_s: PositiveInt = 120
    mem_gb: PositiveFloat | None = None
    cpus_per_task: PositiveInt | None = None
    gpus_per_node: NonNegativeInt = 0
    at_once: PositiveInt | None = None
    job_name: Word = "mptrain"
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    gres: Word | None = None
    nodelist: Word | None = None
    exclude: Word | None = None
    comment: Word | None = None


@dataclass(frozen=True)
class Launcher(LauncherFile):
    """Resources of each job of a sweep, with ``word``, the value of ``--launcher``."""

    word: str = ""


def read_launcher(word: str) -> Launcher:
    """Return what ``--launcher`` names: ``slurm`` with the defaults, or the content of a YAML file."""
    if word == "slurm":
        return Launcher()
    path = Path(word)
    if not path.exists():
        raise ConfigError(
            f"--launcher {word}: there is no such file",
            "name a YAML file, or slurm; without --launcher, --jobs N trains here",
        )
    with contextlib.suppress(OSError):  # reported below
        if (size := path.stat().st_size) > _LARGEST:
            raise ConfigError(
                f"{path} is too large for a launcher file: {size:,} bytes", "a launcher is a few lines of KEY: VALUE"
            )
    if problem := find_unreadable([path]):
        raise ConfigError(problem)
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from error
    return _made(tree, str(path))


def _made(tree: dict[str, Any], source: str) -> Launcher:
    hint = "a launcher runs no commands: set up the environment first, jobs inherit it"
    problems = [Problem(f"unknown key '{key}'", hint) for key in _COMMANDS if key in tree]
    keys = {key: value for key, value in tree.items() if key not in _COMMANDS}
    made = check_section("", keys, LauncherFile, problems)
    if made is not None and 60 * made.timeout_min <= made.signal_delay_s:
        what = f"signal_delay_s: {made.signal_delay_s} seconds is not less than timeout_min"
        problems.append(Problem(what, "write a larger timeout_min"))
    if problems:
        raise ConfigError([Problem(f"{source}: {problem.what}", problem.hint) for problem in problems])
    return Launcher(**vars(made))
