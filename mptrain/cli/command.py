"""Commands and options as the table `mptrain.cli.commands` describes them, and the parsing of options with argparse.

It imports nothing heavy; argparse is imported only if there are options to parse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mptrain.system.errors import UsageError, either

if TYPE_CHECKING:
    from argparse import Namespace


@dataclass(frozen=True)
class Option:
    """An option of one or several commands.

    Attributes:
        name: Long name.
        about: One-line description.
        value: Form of the value, as in usage lines: ``N``, ``DIR``, ``job|hydra|all``; empty for a switch.
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


CONFIG_DIR = Option("--config-dir", "add a folder with your own groups and options", "DIR", "-cd", many=True)
CONFIG_NAME = Option("--config-name", "another top-level config file (default: train)", "NAME", "-cn", default="train")

#: Options about config files.
FOLDERS = (CONFIG_DIR, CONFIG_NAME)

#: Options of every command.
GENERAL = (
    Option("--traceback", "show the traceback of an error; MPTRAIN_TRACEBACK=1 does the same"),
    Option("--help", "show help on a command, a group or a key"),
)


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        run: Function that runs the parsed arguments and returns the exit code.
        lines: Usage lines, from the name of the command on, each with a one-line description. Words in capitals are
            placeholders, ``...`` stands for more of the same, and brackets enclose what may be left out.
        options: Its options.
    """

    run: Callable[[Namespace], int]
    lines: tuple[tuple[str, str], ...]
    options: tuple[Option, ...]

    @property
    def name(self) -> str:
        """Its word on the command line."""
        return self.lines[0][0].split()[0].strip("[]")

    @property
    def about(self) -> str:
        """Help text."""
        return " ".join((self.run.__doc__ or "").split())

    @property
    def form(self) -> str:
        """First usage line without options."""
        return f"mptrain {self.lines[0][0]}"

    @property
    def usage(self) -> tuple[str, ...]:
        """Usage lines; the first one has the options that only some commands have."""
        own = [f" [{one.usage}]" for one in self.options if one not in FOLDERS and self.name != "train"]
        first, *more = (f"mptrain {line}" for line, _ in self.lines)
        return ("".join([first, *own]), *more)

    @cached_property
    def forms(self) -> list[list[str]]:
        """Forms of the arguments of each usage line: ``["RUN|last", "[KEY=VALUE ...]"]``."""
        lines = [line.partition(" ")[2].partition(" [--")[0] for line, _ in self.lines]
        return [re.findall(r"\[[^]]*\]|\S+(?: \.\.\.)?", line) for line in lines]

    @property
    def takes_overrides(self) -> bool:
        """True if some arguments are overrides, at least ``extensions.allow=PACKAGES``."""
        return any("=" in form for line in self.forms for form in line)

    @property
    def takes_keys(self) -> bool:
        """True if some arguments are ``KEY=VALUE`` with any key."""
        return any("KEY=" in form for line in self.forms for form in line)

    @property
    def composes(self) -> bool:
        """True if the arguments can be ``KEY=VALUE`` only, of which one new configuration is composed."""
        return any(line[0].startswith(("KEY=VALUE", "[KEY=VALUE")) for line in self.forms)

    @property
    def needed(self) -> str:
        """Form of the argument that cannot be left out; empty for none."""
        first = self.forms[0][0]
        return "" if self.composes or first.startswith(("[", "KEY=")) else first

    @property
    def most(self) -> float:
        """Largest number of arguments besides ``KEY=VALUE``."""
        named = [[form for form in line if "=" not in form] for line in self.forms]
        return max(math.inf if any("..." in form for form in line) else len(line) for line in named)


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
    for one in options:
        if one.value:
            default, action = ([], "append") if one.many else (one.default, "store")
            parser.add_argument(one.name, type=one.parse, default=default, action=action)
        else:
            action = "store_false" if one.undoes else "store_true"
            parser.add_argument(one.name, dest=one.undoes or None, default=False, action=action)
    try:
        return parser.parse_known_args(_spelled_out(options, words))
    except ArgumentError as error:
        option = next(one for one in options if one.name == error.argument_name)
        raise option.refusal("needs a value" if option.value else "takes no value") from error


def _spelled_out(options: Sequence[Option], words: Sequence[str]) -> list[str]:
    """Return the arguments with the long names of options, and with the values of options that need none."""
    names = {name: one for one in options for name in (one.name, one.short) if name}
    spelled = []
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        name, equals, value = word.partition("=")
        option = names.get(name)
        if option and option.alone and not equals and (following.startswith(("-", "~")) or "=" in following):
            equals, value = "=", option.alone
        spelled.append(f"{option.name}{equals}{value}" if option else word)
    return spelled
