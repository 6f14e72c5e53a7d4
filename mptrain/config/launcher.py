"""Where the jobs of a sweep run instead of here: the file that ``--launcher`` names, or the bare name of an executor.

A file may come from a stranger, and what submitit writes is a script for a shell. So a key has to be one of these, and none
of them is a command (submitit's ``setup``, ``python`` and ``srun_args`` are); a text cannot hold a blank, a quote or the end of a line.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import StringConstraints

from mptrain.config.value_checks import InvalidValueError, RangeDescription, check_value, show
from mptrain.config.yaml_files import find_unreadable, read_yaml
from mptrain.errors import ConfigError, Problem, did_you_mean
from mptrain.fields import NonNegativeInt, PositiveFloat, PositiveInt

Executor = Literal["slurm", "local"]

Word = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:=+@&|*()\[\]-]*$", max_length=200),
    RangeDescription("letters, digits and _.,:=+@&|*()[]-, without blanks"),
]

#: Bytes of a launcher's file at most.
_LARGEST = 100_000

#: Keys of submitit's that run commands, and what to do instead.
_COMMANDS = ("setup", "teardown", "python", "srun_args", "additional_parameters")


@dataclass(frozen=True)
class Launcher:
    """What each job of a sweep asks for.

    Attributes:
        executor: ``slurm``, or ``local``: processes of this machine, to try the rest.
        timeout_min: Minutes of one go; what is not done then is saved, queued again and goes on.
        signal_delay_s: Seconds before that, in which a job saves itself.
        mem_gb: Gigabytes of memory; None leaves it to Slurm.
        cpus_per_task: CPU cores; None leaves it to Slurm.
        gpus_per_node: GPUs.
        at_once: Jobs in the queue at a time; None for all, or one where they run here. ``--jobs N`` goes before it.
        job_name: What ``squeue`` shows.
        partition: Where, as ``sbatch`` has it; so are those below.
        account: Who pays.
        qos: Quality of service.
        constraint: Features of nodes.
        gres: Generic resources.
        nodelist: Nodes to take.
        exclude: Nodes to leave out.
        comment: For whoever reads it.
        word: How it was named on the command line; no key of the file.
    """

    executor: Executor = "slurm"
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
    word: str = ""


def is_elsewhere(launcher: Launcher | None) -> bool:
    """Whether jobs run on machines whose devices are not known here."""
    return launcher is not None and launcher.executor != "local"


def read_launcher(word: str) -> Launcher:
    """The launcher that ``--launcher`` means.

    Args:
        word: ``slurm`` or ``local``, with nothing but defaults; or the path of a YAML file.

    Raises:
        ConfigError: With everything that is wrong with the file.
    """
    if word in get_args(Executor):
        return _made({"executor": word}, "--launcher")
    path = Path(word)
    if not path.exists():
        hint = f"name a YAML file, or one of {', '.join(get_args(Executor))}"
        raise ConfigError(f"--launcher {word}: there is no such file", hint)
    with contextlib.suppress(OSError):  # which is said below
        if (size := path.stat().st_size) > _LARGEST:
            raise ConfigError(f"{path} describes no launcher: it has {size:,} bytes", "it is a few lines of KEY: VALUE")
    if problem := find_unreadable([path]):
        raise ConfigError(problem)
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from error
    return _made(tree, str(path))


def _made(tree: dict[str, Any], place: str) -> Launcher:
    """The launcher of a mapping.

    Raises:
        ConfigError: With everything that is wrong with it.
    """
    hints = get_type_hints(Launcher, include_extras=True)
    del hints["word"]
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in hints:
            guess = did_you_mean(show(key), hints)
            hint = f"did you mean {guess}?" if guess else f"there is {', '.join(hints)}"
            if key in _COMMANDS:
                hint = "a launcher runs no commands: set the environment up before, jobs inherit it"
            problems.append(Problem(f"{place}: unknown key '{show(key)}'", hint))
            continue
        try:
            values[key] = check_value(value, hints[key])
        except InvalidValueError as unfit:
            problems.append(Problem(f"{place}: {key}: {show(value)} {unfit}"))
    if not problems and 60 * (made := Launcher(**values)).timeout_min <= made.signal_delay_s:
        what = f"{place}: signal_delay_s: {made.signal_delay_s} seconds before the end is before the beginning"
        problems.append(Problem(what, "write a larger timeout_min"))
    if problems:
        raise ConfigError(problems)
    return made
