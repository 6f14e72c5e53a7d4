"""``mptrain list [GROUP|recipes]``: lists groups, options, keys, defaults and comments, read from YAML as text."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mptrain.cli.command_line import read_flags
from mptrain.cli.messages import line_width, supports_colour, without_control_characters
from mptrain.config import location
from mptrain.config.catalogue import SHARED, Catalogue, Entry, Option
from mptrain.errors import EXIT_OK, ConfigError, UsageError, did_you_mean

#: Indentation of a text that starts on a new line because its head is too long.
_INDENT = 6

#: Interpolation of a value that the model may set, with its default.
_SELECTED = re.compile(r"\$\{oc\.select:model\.defaults\..*,\s*(?P<default>\[[^]]*\]|[^],{}]*)\}")


def list_groups(words: list[str]) -> int:
    """Print all configuration groups with their options, one group with the keys of every option, or all recipes.

    Args:
        words: Arguments of the command: at most one group, or ``recipes``; and ``--config-dir DIR`` for more folders.

    Returns:
        The exit code 0.

    Raises:
        UsageError: The group does not exist, or there are too many arguments.
        ConfigError: A folder does not exist.
    """
    names, catalogue = read_topics(words)
    if len(names) > 1:
        raise UsageError(f"list shows one group at a time, but '{names[1]}' is given too", "write mptrain list GROUP")
    if not names:
        print(_overview(catalogue))
    elif names[0] in catalogue.groups:
        texts = [option_text(catalogue, option) for option in catalogue.groups[names[0]].values()]
        if shared := SHARED.get(names[0]):
            texts.append("\n".join([_bold(f"every {names[0]}"), *_rows(shared)]))
        print("\n\n".join(texts))
    elif names[0] == "recipes":
        _list_recipes()
    else:
        known = [*catalogue.groups, "recipes"]
        guess = did_you_mean(names[0], known)
        hint = f"did you mean {guess}?" if guess else f"groups are {', '.join(known)}"
        if found := catalogue.options(names[0]):
            group = found[0].group
            hint = f"{names[0]} is an option of {group}: write mptrain list {group} or mptrain help {names[0]}"
        raise UsageError(f"there is no group '{names[0]}'", hint)
    return EXIT_OK


def _list_recipes() -> None:
    from mptrain.cli.reproduce import print_recipe
    from mptrain.recipe.catalogue import find_recipe, recipe_names

    for position, name in enumerate(recipe_names()):
        if position:
            print()
        print_recipe(find_recipe(name))


def read_topics(words: Sequence[str]) -> tuple[Sequence[str], Catalogue]:
    """Return the arguments without ``--config-dir DIR``, and the groups and options of mptrain and of these folders.

    Args:
        words: Arguments of the command.

    Raises:
        ConfigError: A folder does not exist, or a flag is unknown.
    """
    flags = read_flags(words)
    folders = [Path(folder) for folder in flags.config_dirs]
    for folder in folders:
        if not folder.is_dir():
            hint = "give the folder that holds GROUP/OPTION.yaml, for example ./mine with ./mine/model/net.yaml in it"
            raise ConfigError(f"--config-dir {folder}: there is no such folder", hint)
    return flags.overrides, Catalogue([location.configs(), *folders])


def _overview(catalogue: Catalogue) -> str:
    """Return all groups with the names of their options."""
    width, lines = line_width(sys.stdout), []
    for group, options in catalogue.groups.items():
        comment, default = catalogue.comment(group), catalogue.defaults.get(group)
        lines.append(_beside(group, f"   {comment}" if comment else "", bold=True))
        names = without_control_characters("  ".join(f"{name}*" if name == default else name for name in options))
        lines += textwrap.wrap(
            names, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines.append("")
    last = (
        "* default. mptrain help GROUP describes a group's options; mptrain list GROUP adds their keys; "
        "mptrain list recipes shows the recipes."
    )
    return "\n".join([*lines, _beside("", last)])


def option_text(catalogue: Catalogue, option: Option) -> str:
    """Describe an option of a configuration group in several lines: its summary, and its keys, defaults and comments.

    Args:
        catalogue: All groups and options, which has the default option.
        option: The option.
    """
    chosen = "  (default)" if catalogue.defaults.get(option.group) == option.name else ""
    lines = [_bold(without_control_characters(f"{option.group}={option.name}")) + chosen]
    lines += [_beside("  ", words) for words in (option.summary, *_known(option)) if words]
    hidden = ("_target_", "model.defaults.")
    shown = [one for one in option.entries if not (one.key.endswith(hidden[0]) or one.key.startswith(hidden[1]))]
    return "\n".join([*lines, *_rows(shown)])


def _rows(entries: Sequence[Entry]) -> list[str]:
    """Return a line for each key, with its default and its comment."""
    rows = [in_short(one) for one in entries]
    width = min(max((len(key) for key, _ in rows), default=0), 60) + 2
    return [_beside(f"  {key.ljust(width)}  ", comment) for key, comment in rows]


def _known(option: Option) -> list[str]:
    """Return the size of an option, its extra requirements, and the tasks of a data set."""
    needs = option.facts.get("needs", "")
    wanted = f"needs {needs}" if needs and needs != "nothing" else ""
    tasks = f"for task={', '.join(option.tasks)}" if option.group == "dataset" and option.tasks else ""
    return [words for words in (option.facts.get("size", ""), wanted, tasks) if words]


def _beside(head: str, text: str, *, bold: bool = False) -> str:
    """Return a text after its head: wrapped with a hanging indent on a terminal, else on one line."""
    head, text = without_control_characters(head), without_control_characters(text)
    lines = [text]
    if sys.stdout.isatty() and len(head) + len(text) > (width := line_width(sys.stdout)):
        indent = len(head) if len(head) < width // 2 else _INDENT
        lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False) or [""]
        if len(head) + len(lines[0]) > width:
            lines.insert(0, "")
        lines[1:] = [" " * indent + line for line in lines[1:]]
    return "\n".join([f"{_bold(head) if bold else head}{lines[0]}".rstrip(), *lines[1:]])


def in_short(entry: Entry) -> tuple[str, str]:
    """Return ``KEY=VALUE`` and the comment of a configuration key, for a list of keys.

    If the value is an interpolation by which the model's file may set it, VALUE is its default, and the comment says
    so.
    """
    value, comment = entry.value, entry.comment
    if chosen := _SELECTED.fullmatch(value):
        value = chosen["default"]
        comment = "; ".join(filter(None, [comment, "unless the model sets it"]))
    return f"{entry.key}={value}", comment


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if supports_colour(sys.stdout) else text
