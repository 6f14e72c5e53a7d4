"""Commands and options as the table `mptrain.cli.commands` describes them, and the parsing of options with argparse.

It imports nothing heavy; argparse is imported only if there are options to parse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mptrain.system.errors import UsageError, either
from mptrain.system.files import expanded

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.config.schema import Config


@dataclass(frozen=True)
class Option:
    """An option of one or several commands.

    Attributes:
        name: Long name.
        about: One-line description.
        value: What its value may be, between bars: placeholders in capitals (``N``, ``DIR``), or words to be written as
            they are. Several words without a placeholder are all that is allowed. Empty for a switch.
        short: Short name, as in Hydra; empty for none.
        read: Function that converts the value and raises ValueError with a requirement (``must be ...``).
        default: Value if the option is not given.
        alone: Value if the option is given without one; empty if it needs one.
        undoes: Attribute of the switch that this switch turns off; empty for none.
        many: Whether the option may be given several times, and its value is a list.
    """

    name: str
    about: str
    value: str = ""
    short: str = ""
    read: Callable[[str], Any] = str
    default: Any = None
    alone: str = ""
    undoes: str = ""
    many: bool = False

    @property
    def usage(self) -> str:
        """The option as in usage lines: ``--jobs N``."""
        return f"{self.name} {self.value}".rstrip()

    def parse(self, text: str) -> Any:
        """Convert a value of the option; raise UsageError if it is missing or invalid."""
        if not text:
            raise self.refusal("needs a value")
        choices = self.value.split("|")
        try:
            if len(choices) > 1 and self.value.islower() and text not in choices:
                raise ValueError(f"must be {either(choices)}")
            return self.read(text)
        except ValueError as error:
            raise UsageError(f"{self.name} {text}: {error}", f"{self.usage}: {self.about}") from error

    def refusal(self, why: str) -> UsageError:
        """Return the error for an option without its value, or a switch with one."""
        return UsageError(f"{self.name} {why}", f"write {self.usage}: {self.about}")


def whole_number(most: int) -> Callable[[str], int]:
    """Return the function that reads a whole number from 1 to a largest one, as the value of an option."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= most):
            raise ValueError(f"must be a whole number from 1 to {most:,}")
        return int(text)

    return read


def positive_number(text: str) -> float:
    """Read a positive number, as the value of an option."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise ValueError("must be a positive number")
    return number


def number_from_zero(text: str) -> float:
    """Read 0 or a positive number, as the value of an option."""
    if (number := any_number(text)) < 0:
        raise ValueError("must be 0 or a positive number")
    return number


def any_number(text: str) -> float:
    """Read a finite number, as the value of an option."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("must be a number")
    return number


CONFIG_DIR = Option("--config-dir", "add a folder with your own groups and options", "DIR", "-cd", many=True)
CONFIG_NAME = Option("--config-name", "another top-level config file (default: train)", "NAME", "-cn", default="train")

#: Options of ``predict`` about the text that a network writes; without one, the default of its task holds.
WRITING = (
    Option("--length", "number of tokens that continue a text (default: 32)", "N", read=whole_number(100_000)),
    Option("--temperature", "below 1 favours likely tokens, 0 the best (default: 1)", "X", read=number_from_zero),
    Option("--seed", "draw others (default: 1)", "N", read=whole_number(2**31)),
)

#: Options about config files.
FOLDERS = (CONFIG_DIR, CONFIG_NAME)

#: Options of every command.
GENERAL = (
    Option("--traceback", "show the traceback of an error; MPTRAIN_TRACEBACK=1 does the same"),
    Option("--help", "show help on a command, a group or a key"),
)

JOBS = Option(
    "--jobs", "number of runs at a time, sharing CPU cores and GPUs (default: 1)", "N", read=whole_number(9_999)
)
LAUNCHER = Option(
    "--launcher", "submit sweep points to Slurm with submitit; FILE sets its options (YAML)", "slurm|FILE"
)
OBJECTIVE = Option("--objective", "metric on validation data by which points are chosen (default: the task's)", "NAME")
BEST = Option("--best", "take the best checkpoint instead of the last one")
JSON = Option("--json", "print one JSON object on standard output, for programs (mptrain help json)")
RAW = Option("--raw", "take the raw weights if the run also has averaged weights (train.ema_decay)")
_INFO = "all|config|defaults|defaults-tree|plugins|searchpath"

#: Options of a training command. They may also come before the name of a command that takes them.
TRAINING = (
    Option("--multirun", "sweep: KEY=A,B, KEY=range(1,4), GROUP=glob(fp16*)", short="-m"),
    Option("--run", "train one run: the opposite of --multirun", short="-r", undoes="multirun"),
    JOBS,
    LAUNCHER,
    OBJECTIVE,
    *FOLDERS,
    Option("--cfg", "show the composed configuration", "job|hydra|all", "-c"),
    Option("--resolve", "resolve interpolations in what --cfg shows"),
    Option("--package", "part of the configuration that --cfg shows", "KEY", "-p"),
    Option("--info", "show how Hydra composes the configuration", _INFO, "-i", alone="all"),
)

#: The key of an override that may have any key.
ANY_KEY = "KEY"


@dataclass(frozen=True)
class Argument:
    """An argument of a command, or several of the same kind.

    Attributes:
        value: What it may be, between bars: placeholders in capitals, or words to be written as they are: ``RUN|last``.
        nargs: Number of such arguments, as in argparse: ``?`` for at most one, ``*`` for any number, ``+`` for at least
            one; empty for one.
        key: Key of an override, `ANY_KEY` for any; empty for an argument that is no override.
        noun: What a message calls it.
        hint: End of the hint if it is missing.
    """

    value: str
    nargs: Literal["", "?", "*", "+"] = ""
    key: str = ""
    noun: str = ""
    hint: str = ""

    @property
    def repeats(self) -> bool:
        """True if there may be several."""
        return self.nargs in ("*", "+")

    @property
    def optional(self) -> bool:
        """True if it may be left out."""
        return self.nargs in ("?", "*")

    @property
    def usage(self) -> str:
        """The argument as in usage lines: ``[KEY=VALUE ...]``."""
        text = f"{self.key}{'=' * bool(self.key)}{self.value}{' ...' * self.repeats}"
        return f"[{text}]" if self.optional else text


CONFIGURATION, OVERRIDES = Argument("VALUE", "+", ANY_KEY), Argument("VALUE", "*", ANY_KEY)
RUN = Argument("RUN|last", noun="a run directory", hint="last stands for the run that was started last")
RUN_OR_SWEEP = replace(RUN, value="RUN|SWEEP|last")
RECIPE = Argument("RECIPE", noun="the name of a recipe", hint="mptrain list recipes shows them")
RECIPE_OR_OPTION = Argument(
    "RECIPE|GROUP/OPTION", noun="the name of a recipe or an option", hint="such as mptrain copy model/resnet18"
)
WANTED = Argument("lr|batch", noun="what to find: lr or batch", hint="such as mptrain find lr model=cnn")
SHELL = Argument("bash|zsh|fish", noun="the name of a shell", hint="such as mptrain completion bash")


@dataclass(frozen=True)
class Usage:
    """One way to call a command.

    Attributes:
        about: One-line description.
        arguments: Its arguments in order, besides options.
        switch: Option that it begins with; empty for none.
        options: Options that its usage line has.
    """

    about: str
    arguments: tuple[Argument, ...]
    switch: str = ""
    options: tuple[Option, ...] = ()

    def line(self, name: str, options: Iterable[Option] = ()) -> str:
        """Return the usage line of the command with this name, with further options."""
        words = (argument.usage for argument in self.arguments)
        own = (f"[{option.usage}]" for option in (*self.options, *options))
        return " ".join(filter(None, ("mptrain", name, self.switch, *words, *own)))


@dataclass(frozen=True)
class Outcome:
    """Result of a command with the option `JSON`, before it is printed.

    Attributes:
        code: Exit code of the command.
        show: Function that prints the result as text.
        data: Function that returns the object which ``--json`` prints instead, an `mptrain.cli.answer.Answer`.
            It imports the class of the object, which needs more than the text.
    """

    code: int
    show: Callable[[], None]
    data: Callable[[], Any]


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        run: Function that runs the parsed arguments and returns the exit code, or a result to print.
        name: Its word on the command line.
        usages: The ways to call it, the usual one first.
        options: Its options.
    """

    run: Callable[[Namespace], int | Outcome]
    name: str
    usages: tuple[Usage, ...]
    options: tuple[Option, ...]

    @property
    def about(self) -> str:
        """Help text."""
        return " ".join((self.run.__doc__ or "").split())

    @property
    def form(self) -> str:
        """First usage line without options."""
        return self.usages[0].line("[train]" if self.name == "train" else self.name)

    @property
    def usage(self) -> tuple[str, ...]:
        """Usage lines; the first one has the options that only some commands have."""
        first, *more = self.usages
        if self.name == "train":  # the word can be left out
            return (self.form, *(usage.line("") for usage in more))
        own = [option for option in self.options if option not in FOLDERS]
        return (first.line(self.name, own), *(usage.line(self.name) for usage in more))

    @property
    def first(self) -> Argument:
        """First argument in the usual call."""
        return self.usages[0].arguments[0]

    @property
    def takes_run(self) -> bool:
        """True if the first argument is a run, at least in the usual call."""
        return self.first.value.startswith("RUN")

    @property
    def reads_input(self) -> bool:
        """True if the argument ``-`` stands for standard input."""
        return any("-" in argument.value.split("|") for usage in self.usages for argument in usage.arguments)

    @property
    def takes_overrides(self) -> bool:
        """True if some arguments are overrides, at least ``extensions.allow=PACKAGES``."""
        return any(argument.key for usage in self.usages for argument in usage.arguments)

    @property
    def takes_keys(self) -> bool:
        """True if some arguments are ``KEY=VALUE`` with any key."""
        return any(argument.key == ANY_KEY for usage in self.usages for argument in usage.arguments)

    @property
    def composes(self) -> bool:
        """True if the arguments can be ``KEY=VALUE`` only, of which one new configuration is composed."""
        return any(usage.arguments[0].key and usage.arguments[0].repeats for usage in self.usages)

    @property
    def needed(self) -> Argument | None:
        """Argument that cannot be left out; None if every argument can be, or if overrides may take its place."""
        return None if self.composes or self.first.optional or self.first.key else self.first

    @property
    def most(self) -> float:
        """Largest number of arguments besides ``KEY=VALUE``."""
        named = [[argument for argument in usage.arguments if not argument.key] for usage in self.usages]
        return max(math.inf if any(argument.repeats for argument in some) else len(some) for some in named)


_Run = TypeVar("_Run", bound=Callable[["Namespace"], int | Outcome])

#: Commands that were entered, by name.
ENTERED: dict[str, Command] = {}


def command(
    about: str, *arguments: Argument, also: Sequence[Usage] = (), options: Sequence[Option] = ()
) -> Callable[[_Run], _Run]:
    """Enter a function, named after its command, into the table: how it is usually called, other ways, its options."""

    def enter(run: _Run) -> _Run:
        usages = (Usage(about, arguments), *also)
        name = run.__name__.removeprefix("_")
        ENTERED[name] = Command(run, name, usages, tuple(options))
        return run

    return enter


def read_options(options: Sequence[Option], words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Separate options (``--jobs 2``) from the other arguments.

    Args:
        options: The options.
        words: Arguments.

    Returns:
        The value of each option by its name, and the other arguments, including unknown options.

    Raises:
        UsageError: An option lacks its value or has an invalid one, or a switch has one.
    """
    from argparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for opt in options:
        if opt.value:
            default, action = ([], "append") if opt.many else (opt.default, "store")
            parser.add_argument(opt.name, type=opt.parse, default=default, action=action)
        else:
            action = "store_false" if opt.undoes else "store_true"
            parser.add_argument(opt.name, dest=opt.undoes or None, default=False, action=action)
    try:
        return parser.parse_known_args(_spelled_out(options, words))
    except ArgumentError as error:
        option = next(option for option in options if option.name == error.argument_name)
        raise option.refusal("needs a value" if option.value else "takes no value") from error


def _spelled_out(options: Sequence[Option], words: Sequence[str]) -> list[str]:
    """Return the arguments with the long names of options, and with values that argparse would not take for theirs.

    These are the values of options that need none, and negative numbers such as ``-1e-3``.
    """
    names = {name: option for option in options for name in (option.name, option.short) if name}
    spelled, is_taken = [], False
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        if is_taken:
            is_taken = False
            continue
        name, equals, value = word.partition("=")
        option = names.get(name)
        if option and option.alone and not equals and (following.startswith(("-", "~")) or "=" in following):
            equals, value = "=", option.alone
        elif option and option.value and not equals and re.match(r"-(\.?\d|inf|nan)", following):
            equals, value, is_taken = "=", following, True
        spelled.append(f"{option.name}{equals}{value}" if option else word)
    return spelled


def named_folder(word: str) -> Path:
    """Return the folder that an argument names: a path, or else the name of a run under ``outputs``.

    Args:
        word: The argument; ``run.name=`` puts runs under ``outputs``. A path that does not exist is returned as it is.
    """
    path, named = expanded(word), Path("outputs") / word
    return named if named.is_dir() and not path.exists() else path


def run_folder(run: str, overrides: Sequence[str]) -> str:
    """Return the directory of an existing run that the user named, without importing torch.

    Args:
        run: Path of the run directory, the run's name below ``run.root``, or ``last`` for the newest run there.
        overrides: Overrides of the command, of which ``run.root`` counts here.

    Raises:
        StorageError: There is no such run (see `mptrain.runlog.directory.find_run`).
    """
    from mptrain.runlog.directory import find_run

    root = next((word.partition("=")[2] for word in reversed(overrides) if word.startswith("run.root=")), "outputs")
    return str(find_run(run, expanded(root.strip("'\""))).root)


def named_folder_or_last(word: str) -> Path:
    """Return the folder that an argument names, as `named_folder`, or for ``last`` that of the run started last."""
    from mptrain.runlog.directory import last_run

    return last_run(Path("outputs")).root if word == "last" else named_folder(word)


def composed(arguments: Namespace) -> Config:
    """Return the configuration of the words of a command, after its warnings; raise ConfigError if it is invalid."""
    from mptrain.cli.messages import warn
    from mptrain.config.compose import compose

    if ours := [word for word in arguments.overrides if word.startswith(("hydra/", "hydra.sweeper"))]:
        raise UsageError(f"{ours[0]} has no effect on a single run", "add -m, and give several values: KEY=A,B")
    config = compose(arguments.overrides, config_dirs=arguments.config_dir, config_name=arguments.config_name)
    warn(config.warnings)
    return config
