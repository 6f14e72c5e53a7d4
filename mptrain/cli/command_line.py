"""Parsing of the command line: options and their values, overrides, and hints for mistyped arguments.

Hydra's own flags keep their names. Flags that display something are passed to Hydra (`mptrain.cli.hydra_app`). This
module parses the others, because training does not go through ``hydra.main``. It imports nothing heavy, so that usage
errors appear at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mptrain.cli.help import USAGE
from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.config.synonyms import guess_word, translate_command
from mptrain.errors import ConfigError, Problem, UsageError, did_you_mean, either, near_names

#: Short names of options.
ALIASES = {
    "-cd": "--config-dir",
    "-cn": "--config-name",
    "-m": "--multirun",
    "-r": "--run",
    "-c": "--cfg",
    "-p": "--package",
    "-i": "--info",
    "-sc": "--shell-completion",
}

#: Options of a training command that take a value. They may also come before the name of another command.
TRAINING = {"--config-dir": "VALUE", "--config-name": "VALUE", "--jobs": "VALUE", "--launcher": "VALUE"}

#: Values of ``--cfg`` and ``--info``.
_CFG = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")

_WITH_VALUE = (*TRAINING, "--cfg", "--package")
_SUGGESTED = ("--help", "--version", "--multirun", *TRAINING, "--cfg", "--resolve", "--package")
_SUGGESTED += ("--info", "--shell-completion", "--traceback")


@dataclass(frozen=True)
class Flags:
    """Parsed arguments of a training command: ``mptrain [train] KEY=VALUE ... [-m]`` and Hydra's display flags.

    Attributes:
        overrides: The arguments that are not flags (``KEY=VALUE``).
        multirun: Whether to sweep: train every combination of overrides with several values.
        config_dirs: Additional folders of groups and options.
        config_name: Name of the top-level config file, without ``.yaml``.
        jobs: Number of sweep points (runs) to execute at a time; None if not given.
        launcher: Launcher of the sweep points: a file or the name of an executor; None runs them on this machine.
        cfg: Kind of configuration that Hydra shows (``job``, ``hydra``, ``all``); empty for none.
        package: Part of the configuration to show; None for the whole.
        resolve: Whether to resolve interpolations in the shown configuration.
        info: Kind of composition details that Hydra shows; empty for none.
        hydra_help: Whether to show Hydra's own help.
        completion: Shell given with Hydra's ``-sc install=SHELL``; empty if not given.
    """

    overrides: tuple[str, ...]
    multirun: bool = False
    config_dirs: tuple[str, ...] = ()
    config_name: str = "train"
    jobs: int | None = None
    launcher: str | None = None
    cfg: str = ""
    package: str | None = None
    resolve: bool = False
    info: str = ""
    hydra_help: bool = False
    completion: str = ""

    @property
    def show(self) -> bool:
        """True if any flag asks Hydra to display something instead of training."""
        return bool(self.cfg or self.package or self.resolve or self.info or self.hydra_help)


def take_options(
    words: Sequence[str], valued: Mapping[str, str], switches: Collection[str] = ()
) -> tuple[list[str], dict[str, list[str]]]:
    """Separate the options of a command (``--jobs 2``) from its other arguments.

    Args:
        words: Arguments of the command.
        valued: Options with a value, after ``=`` or as the next argument, each mapped to the value's name in hints.
        switches: Options without a value.

    Returns:
        The other arguments, including unknown options; and a mapping from each option that was given to its values, in
        the order of the options' last occurrences. The list of a switch is empty.

    Raises:
        UsageError: An option lacks its value.
    """
    rest, others = list(words), []
    found: dict[str, list[str]] = {}
    while rest:
        word = rest.pop(0)
        written, equals, value = word.partition("=")
        flag = ALIASES.get(written, written)
        if flag in switches and not equals:
            found[flag] = found.pop(flag, [])
        elif flag in valued:
            if not equals and rest and (not rest[0].startswith("-") or rest[0][1:2].isdigit()):
                value = rest.pop(0)
            if not value:
                raise UsageError(f"{written} needs a value", f"write {written} {valued[flag]}")
            found[flag] = [*found.pop(flag, []), value]
        else:
            others.append(word)
    return others, found


def read_flags(words: Sequence[str]) -> Flags:
    """Parse the flags and ``KEY=VALUE`` overrides of a training command.

    Args:
        words: Arguments of the command.

    Raises:
        UsageError: A flag lacks its value or has an invalid one.
        ConfigError: There are unknown flags. The error also lists the problems of the overrides.
    """
    alone = ("--multirun", "--run", "--resolve", "--hydra-help", "--shell-completion")
    rest, found = take_options(words, dict.fromkeys(_WITH_VALUE, "VALUE"), alone)
    problems: list[Problem] = []
    meant_words: list[str] = []
    overrides: list[str] = []
    info = ""
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        has_value = not equals and rest and "=" not in rest[0] and not rest[0].startswith(("-", "~"))
        if not word.startswith("-"):
            overrides.append(word)
        elif flag in ("--info", "-i"):
            info = value or (rest.pop(0) if has_value else "all")
        else:
            value = rest.pop(0) if has_value else value
            meant = flag_hint(word, value or "VALUE")
            problems.append(Problem(f"unknown option '{word}'", _hint(word, meant)))
            if value:
                sentence = meant.startswith("mptrain") or ", " in meant
                meant_words += [one for one in meant.split() if "=" in one and not sentence]
    flags = training_flags(found, overrides, multirun=[one for one in found if one in alone[:2]][-1:] == ["--multirun"])
    if problems:
        raise ConfigError([*problems, *([] if flags.multirun else _problems_of(flags, [*overrides, *meant_words]))])
    for option in ("--jobs", "--launcher"):
        if option in found and not flags.multirun:
            raise UsageError(f"{option} applies only to sweeps", "add -m, or remove it")
    cfg = found.get("--cfg", [""])[-1]
    if cfg and cfg not in _CFG:
        raise UsageError(f"--cfg {cfg}: invalid value", f"choose from {', '.join(_CFG)}")
    if info and info not in _INFO:
        raise UsageError(f"--info {info}: invalid value", f"choose from {', '.join(_INFO)}")
    shell = ""
    if "--shell-completion" in found:  # the command ``completion`` checks the name of the shell
        if len(overrides) != 1 or not overrides[0].startswith("install="):
            raise UsageError("-sc takes install=SHELL and nothing else", "write mptrain completion SHELL")
        shell = overrides[0].removeprefix("install=")
    return replace(
        flags,
        cfg=cfg,
        package=found.get("--package", [None])[-1],
        resolve="--resolve" in found,
        info=info,
        hydra_help="--hydra-help" in found,
        completion=shell,
    )


def training_flags(found: Mapping[str, list[str]], overrides: Sequence[str], *, multirun: bool) -> Flags:
    """Build the flags of a training command from options that `take_options` found.

    Args:
        found: Values of the options in `TRAINING`, by option.
        overrides: The arguments that are not options.
        multirun: Whether the command is a sweep.

    Raises:
        UsageError: The value of ``--jobs`` is invalid.
    """
    jobs, launcher = found.get("--jobs"), found.get("--launcher")
    return Flags(
        tuple(overrides),
        multirun,
        tuple(found.get("--config-dir", ())),
        found.get("--config-name", ["train"])[-1],
        read_jobs(jobs[-1]) if jobs else None,
        launcher[-1] if launcher else None,
    )


def read_jobs(text: str) -> int:
    """Parse the value of ``--jobs``, the number of runs to execute at a time.

    Raises:
        UsageError: The value is not a whole number from 1 to 9,999.
    """
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10_000):
        raise UsageError(f"--jobs {text}: must be a whole number, at least 1", "write for example --jobs 2")
    return int(text)


def command_first(words: list[str], commands: Collection[str]) -> list[str]:
    """Return the command line with the command in front, if training options precede it: ``--jobs 2 compare ...``.

    Args:
        words: Arguments after the program's name.
        commands: Names of all commands.
    """
    place = 0
    while place < len(words):
        flag, equals, _ = words[place].partition("=")
        if (flag := ALIASES.get(flag, flag)) not in (*TRAINING, "--multirun"):
            break
        place += 2 if flag in TRAINING and not equals else 1
    if place < len(words) and words[place] in commands:
        return [words[place], *words[:place], *words[place + 1 :]]
    return words


def refuse_blanks(words: list[str], commands: Collection[str], *, keys: bool) -> None:
    """Reject overrides with blanks: ``KEY = VALUE``, ``KEY= VALUE``, ``KEY =VALUE`` and ``KEY VALUE``.

    A shell splits them into several words.

    Args:
        words: Arguments after the program's name.
        commands: Names of all commands; they are never taken for keys.
        keys: Whether this command reads a key without ``=`` followed by a plain word as ``KEY VALUE``.

    Raises:
        ConfigError: At least one such form was found; the error lists all of them.
    """
    problems = []
    rest = list(words)
    flag = ""  # the option before the current two words
    while len(rest) > 1:
        before, word = rest[0], rest[1]
        plain = "=" not in word and word[:1] not in ("-", "~", "")
        used, what = 2, ""
        if word.startswith("=") and "=" not in before and not before.startswith("-"):
            used, what = 3 if word == "=" else 2, "no spaces around '='"
        elif before.endswith("=") and before != "=" and plain:
            what = "no spaces around '='"
        elif keys and not flag and "=" not in before and plain and _is_key(before, commands):
            what = "no '=' between key and value"
        else:
            used = 1
        if what:
            meant = "".join(rest[:used]) if "=" in before + word else f"{before}={word}"
            problems.append(Problem(f"'{' '.join(rest[:used])}': {what}", f"write {meant}"))
        flag = before if before.startswith("--") and before != "--multirun" else ""  # may take a value
        del rest[:used]
    if problems:
        raise ConfigError(problems)


def command_hint(word: str, commands: Collection[str]) -> str:
    """Return the hint for a first argument that is not a command, such as ``did you mean mptrain compare?``.

    It may be a group, a key, an option, a run directory or another program's name of a command.

    Args:
        word: The argument.
        commands: Names of all commands.
    """
    from mptrain.runlog.run_paths import RUN_JSON

    catalogue = Catalogue([location.configs()])
    if word in catalogue.groups:
        return f"write {word}=OPTION; mptrain help {word} shows the options"
    if word in catalogue.usual_keys():
        return f"write {word}=VALUE"
    if options := catalogue.options(word):
        return f"write {options[0].group}={word}"
    key, colon, value = word.partition(":")
    if colon and key in catalogue.usual_keys():
        return f"write {key}={value}"
    if os.path.isfile(os.path.join(word, RUN_JSON)):  # noqa: PTH113, PTH118
        return f"write mptrain resume {word}, or mptrain report {word}"
    if command := translate_command(word):
        return f"did you mean mptrain {command}?" + " mptrain help sweep explains sweeps" * (command == "-m")
    if near := near_names(word, commands):
        return f"did you mean {either(near)}?"
    return f"commands are {', '.join(commands)}; configuration is KEY=VALUE"


def run_and_overrides(command: str, words: list[str]) -> tuple[str, list[str]]:
    """Split the arguments of a command on a run into the run directory (or ``last``) and the overrides.

    Args:
        command: Name of the command, for messages.
        words: Arguments of the command.

    Raises:
        UsageError: No run is given.
        ConfigError: Arguments after the run are not of the form KEY=VALUE; the error lists all of them.
    """
    if not words or words[0].startswith("-") or ("=" in words[0] and not _is_place(words[0])):
        raise UsageError(f"{command} needs a run directory", f"write mptrain {command} last, or mptrain {command} PATH")
    problems = []
    rest = words[1:]
    while rest:
        word = rest.pop(0)
        if "=" in word and not word.startswith("-"):
            continue
        meant = ""
        if word.startswith("--"):
            value = word.partition("=")[2]
            if "=" not in word and rest and "=" not in rest[0] and not rest[0].startswith("-"):
                value = rest.pop(0)
            meant = flag_hint(word, value or "VALUE")
        hint = f"did you mean {meant}? KEY=VALUE takes no leading dashes" if meant else ""
        problems.append(
            Problem(f"'{word}' is not of the form KEY=VALUE", hint or f"mptrain {command} RUN KEY=VALUE ...")
        )
    if problems:
        raise ConfigError(problems)
    return words[0], words[1:]


def place_of(run: str, overrides: Sequence[str]) -> str:
    """Return the directory of an existing run that the user named, without importing torch.

    Args:
        run: Path of the run directory, the run's name below ``run.root``, or ``last`` for the newest run there.
        overrides: Overrides of the command, of which ``run.root`` counts here.

    Raises:
        StorageError: There is no such run (see `mptrain.runlog.directory.find_run`).
    """
    from mptrain.runlog.directory import find_run

    root = next((word.partition("=")[2] for word in reversed(overrides) if word.startswith("run.root=")), "outputs")
    return str(find_run(run, Path(root.strip("'\"")).expanduser()).root)


def _is_key(word: str, commands: Collection[str]) -> bool:
    if word in commands or os.path.exists(word):  # noqa: PTH110
        return False
    return word in Catalogue([location.configs()]).usual_keys()


def _is_place(word: str) -> bool:
    """Return whether a word that contains ``=`` is a folder; sweeps name run folders after overrides."""
    return any(os.path.isdir(place) for place in (word, os.path.join("outputs", word)))  # noqa: PTH112, PTH118


def flag_hint(word: str, value: str, flags: Sequence[str] = _SUGGESTED) -> str:
    """Return the arguments that an unknown flag and its value probably mean: ``train.epochs=3`` for ``--epochs 3``.

    Args:
        word: The flag as typed.
        value: Its value, or a placeholder.
        flags: Flags of the command.

    Returns:
        The suggested arguments; empty if there is no guess or the flag resembles one of ``flags``.
    """
    catalogue = Catalogue([location.configs()])
    flag, equals, _ = word.partition("=")
    name = flag.lstrip("-")
    if not equals and name in USAGE:
        return f"mptrain {name}"
    like = did_you_mean(flag, flags)
    another_flag = like and (not equals or like in _WITH_VALUE or flags is not _SUGGESTED)
    return guess_word(name, value, catalogue, exact=True) or (
        "" if another_flag else guess_word(name, value, catalogue)
    )


def _hint(word: str, meant: str) -> str:
    """Return the hint for an unknown flag, given the arguments that `flag_hint` suggests."""
    flag = word.partition("=")[0]
    if flag == "--version":
        return "use it alone: mptrain --version"
    if flag in ("--config-path", "-cp"):
        return "--config-dir adds a folder of groups and options"
    if meant.startswith("mptrain "):
        return f"did you mean {meant}?"
    if meant:
        return f"did you mean {meant}? KEY=VALUE takes no leading dashes"
    guess = "--version" if flag == "-v" else did_you_mean(flag, _SUGGESTED)
    return f"did you mean {guess}?" if guess else "configuration is KEY=VALUE; mptrain --help shows the options"


def _problems_of(flags: Flags, overrides: Sequence[str]) -> Sequence[Problem]:
    """Return the problems of the overrides next to unknown flags, so that one error reports everything."""
    if not overrides or not all("=" in word for word in overrides):  # arguments of another command
        return ()
    from mptrain.config.compose import compose

    try:
        compose(overrides, config_dirs=flags.config_dirs, config_name=flags.config_name)
    except ConfigError as error:
        return error.problems
    return ()
