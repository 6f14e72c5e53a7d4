"""``mptrain list [GROUP|recipes]``: groups, options, keys, defaults, comments, read from YAML as text."""

from __future__ import annotations

import re
import sys
import textwrap

from mptrain.cli.messages import colourful, harmless
from mptrain.cli.rows import width_of
from mptrain.config import location
from mptrain.config.catalogue import Catalogue, Entry, Option
from mptrain.errors import EXIT_OK, ConfigError, UsageError, did_you_mean

#: Indentation of a text that begins on a line of its own because its head leaves no room.
_INDENT = 6

#: A value that the model may choose, with the one that holds otherwise.
_SELECTED = re.compile(r"\$\{oc\.select:model\.defaults\..*,\s*(?P<default>\[[^]]*\]|[^],{}]*)\}")


def list_groups(words: list[str]) -> int:
    """Prints all groups with their options, or one group with the keys of every option; or all recipes.

    Args:
        words: At most one group, or ``recipes``, and ``--config-dir DIR`` for folders of one's own.

    Raises:
        UsageError: No such group, or too many words.
        ConfigError: A folder does not exist.
    """
    from pathlib import Path

    from mptrain.cli.flags import read_flags

    flags = read_flags(words)
    names = flags.overrides
    folders = [Path(folder) for folder in flags.config_dirs]
    for folder in folders:
        if not folder.is_dir():
            hint = "give the folder that holds GROUP/OPTION.yaml, for example ./mine with ./mine/model/net.yaml in it"
            raise ConfigError(f"--config-dir {folder}: there is no such folder", hint)
    catalogue = Catalogue([location.configs(), *folders])
    if len(names) > 1:
        raise UsageError(f"list shows one group at a time, but there is '{names[1]}' too", "write mptrain list GROUP")
    if not names:
        _print_all(catalogue)
        return EXIT_OK
    name = names[0]
    if name == "recipes":
        return _list_recipes()
    if name not in catalogue.groups:
        guess = did_you_mean(name, [*catalogue.groups, "recipes"])
        hint = f"did you mean {guess}?" if guess else f"there is {', '.join([*catalogue.groups, 'recipes'])}"
        if found := catalogue.options(name):
            group = found[0].group
            hint = f"it is an option of {group}: write mptrain list {group}, or mptrain help {name} for it alone"
        raise UsageError(f"there is no group '{name}'", hint)
    _print_group(catalogue, name)
    return EXIT_OK


def _list_recipes() -> int:
    from mptrain.cli.reproduce import print_recipe
    from mptrain.recipe.catalogue import find_recipe, recipe_names

    for position, name in enumerate(recipe_names()):
        if position:
            print()
        print_recipe(find_recipe(name))
    return EXIT_OK


def _print_all(catalogue: Catalogue) -> None:
    width = max(len(name) for options in catalogue.groups.values() for name in options) + 2
    for group, options in catalogue.groups.items():
        comment = catalogue.comment(group)
        _print(group, f"   {comment}" if comment else "", bold=True)
        for name, option in options.items():
            mark = "*" if catalogue.defaults.get(group) == name else " "
            _print(f"  {mark} {name.ljust(width)}", option.summary)
            if known := "; ".join(_known(option)):
                _print(" " * (width + 4), known)
        print()
    _print(
        "",
        "* chosen where nothing else is said. mptrain list GROUP shows the keys of its options; mptrain list recipes, recipes.",
    )


def _print_group(catalogue: Catalogue, group: str) -> None:
    options = list(catalogue.groups[group].values())
    for position, option in enumerate(options):
        if position:
            print()
        print_option(catalogue, option)


def print_option(catalogue: Catalogue, option: Option) -> None:
    """Print an option with its keys, their defaults and comments."""
    chosen = "  (default)" if catalogue.defaults.get(option.group) == option.name else ""
    print(_bold(harmless(f"{option.group}={option.name}")) + chosen)
    if option.summary:
        _print("  ", option.summary)
    for words in _known(option):
        _print("  ", words)
    _print_entries(option)


def _known(option: Option) -> list[str]:
    """How large it is, what it needs besides mptrain, and what a data set is for."""
    needs = option.facts.get("needs", "")
    wanted = f"needs {needs}" if needs and needs != "nothing" else ""
    tasks = f"for task={', '.join(option.tasks)}" if option.group == "dataset" and option.tasks else ""
    return [words for words in (option.facts.get("size", ""), wanted, tasks) if words]


def _print_entries(option: Option) -> None:
    rows = []
    for entry in option.entries:
        if entry.key.endswith("_target_") or entry.key.startswith("model.defaults."):
            continue
        rows.append(in_short(entry))
    width = min(max((len(key) for key, _ in rows), default=0), 60) + 4
    for key, comment in rows:
        _print(f"  {key.ljust(width - 2)}  ", comment)


def _print(head: str, text: str, *, bold: bool = False) -> None:
    """Print a text behind a head: on a terminal in lines that fit it, indented as far as the head is long, else in one line."""
    head, text = harmless(head), harmless(text)
    first = text
    more: list[str] = []
    if sys.stdout.isatty() and len(head) + len(text) > (width := width_of(sys.stdout)):
        indent = len(head) if len(head) < width // 2 else _INDENT
        lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False) or [""]
        first, more = (lines[0], lines[1:]) if len(head) + len(lines[0]) <= width else ("", lines)
        more = [" " * indent + line for line in more]
    print(f"{_bold(head) if bold else head}{first}".rstrip(), *more, sep="\n")


def in_short(entry: Entry) -> tuple[str, str]:
    """Return ``KEY=VALUE`` and the comment of a key; of a value that the model may choose, the one that holds otherwise."""
    value, comment = entry.value, entry.comment
    if chosen := _SELECTED.fullmatch(value):
        value = chosen["default"]
        comment = "; ".join(filter(None, [comment, "unless the model says otherwise"]))
    return f"{entry.key}={value}", comment


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if colourful(sys.stdout) else text
