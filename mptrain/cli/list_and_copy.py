"""``mptrain list`` and ``mptrain copy``: groups, options, keys and comments, read from YAML as text, and copies."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain import shelves
from mptrain.cli.messages import line_width, say, supports_colour, without_control_characters, wrap_words
from mptrain.config.catalogue import SHARED, Catalogue, ConfigOption, Entry, configs_folder, recipes_folder
from mptrain.runlog.directory import require_outside_runs
from mptrain.system.errors import EXIT_OK, ConfigError, StorageError, UsageError, either, near_names, suggest

if TYPE_CHECKING:
    from argparse import Namespace


#: Interpolation of a value that the model may set, with its default.
_SELECTED = re.compile(r"\$\{oc\.select:model\.defaults\..*,\s*(?P<default>\[[^]]*\]|[^],{}]*)\}")


def list_groups(arguments: Namespace) -> int:
    """Print all configuration groups with their options, one group with the keys of every option, or all recipes.

    Args:
        arguments: Arguments of the command: at most one group, or ``recipes``; and ``--config-dir``.

    Returns:
        The exit code 0.

    Raises:
        UsageError: The group does not exist.
        ConfigError: A folder does not exist.
    """
    catalogue = catalogue_with(arguments.config_dir)
    name = next(iter(arguments.words), None)
    if name is None:
        print(_overview(catalogue))
    elif name in catalogue.groups:
        texts = [option_text(catalogue, option) for option in catalogue.groups[name].values()]
        if shared := SHARED.get(name):
            texts.append("\n".join([bold(f"every {name}"), *_rows(map(in_short, shared))]))
        print("\n\n".join(texts))
    elif name == "recipes":
        shelves.load("study", "mptrain list recipes").print_recipes()
    else:
        known = [*catalogue.groups, "recipes"]
        hint = suggest(name, known, f"groups are {', '.join(known)}")
        if options := catalogue.options(name):
            group = options[0].group
            hint = f"{name} is an option of {group}: write mptrain list {group} or mptrain help {name}"
        raise UsageError(f"there is no group '{name}'", hint)
    return EXIT_OK


def catalogue_with(config_dirs: Sequence[str]) -> Catalogue:
    """Return the groups and options of mptrain and of the user's folders.

    Args:
        config_dirs: Values of ``--config-dir``.

    Raises:
        ConfigError: A folder does not exist.
    """
    folders = [Path(folder) for folder in config_dirs]
    for folder in folders:
        if not folder.is_dir():
            hint = "give the folder that holds GROUP/OPTION.yaml, for example ./mine with ./mine/model/net.yaml in it"
            raise ConfigError(f"--config-dir {folder}: there is no such folder", hint)
    return Catalogue([configs_folder(), *folders])


def _overview(catalogue: Catalogue) -> str:
    """Return all groups with the names of their options."""
    lines: list[str] = []
    for group, options in catalogue.groups.items():
        default = catalogue.defaults.get(group)
        name, *more = columns([(group, catalogue.comment(group))], width=_width(), indent="")
        lines += [name.replace(group, bold(group), 1), *more]
        names = without_control_characters("  ".join(f"{name}*" if name == default else name for name in options))
        lines += [*_wrapped(names, line_width(sys.stdout), "  "), ""]
    last = (
        "* default. mptrain help GROUP describes a group's options; mptrain list GROUP adds their keys; "
        "mptrain list recipes shows the recipes."
    )
    return "\n".join([*lines, *_wrapped(last, _width())])


def option_text(catalogue: Catalogue, option: ConfigOption) -> str:
    """Describe an option of a configuration group in several lines: its summary, and its keys, defaults and comments.

    Args:
        catalogue: All groups and options, which has the default option.
        option: The option.
    """
    chosen = "  (default)" if catalogue.defaults.get(option.group) == option.name else ""
    lines = [bold(without_control_characters(f"{option.group}={option.name}")) + chosen]
    for text in filter(None, (option.summary, *_known(option))):
        lines += _wrapped(without_control_characters(text), _width(), "  ")
    hidden = ("_target_", "model.defaults.")
    shown = [
        entry for entry in option.entries if not (entry.key.endswith(hidden[0]) or entry.key.startswith(hidden[1]))
    ]
    return "\n".join([*lines, *_rows(map(in_short, shown))])


def _rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    return columns(list(rows), width=_width(), widest=60)


def _known(option: ConfigOption) -> list[str]:
    """Return the size of an option, its extra requirements, and the tasks of a data set."""
    needs = option.facts.get("needs", "")
    wanted = f"needs {needs}" if needs and needs != "nothing" else ""
    tasks = f"for task={', '.join(option.tasks)}" if option.group == "dataset" and option.tasks else ""
    return [words for words in (option.facts.get("size", ""), wanted, tasks) if words]


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


def columns(rows: Sequence[tuple[str, str]], width: int, widest: int = 40, indent: str = "  ") -> list[str]:
    """Return lines of two columns, names and texts, without control characters.

    Args:
        rows: Pairs of name and text. The text of a name that is too long for its column begins on the next line.
        width: Width in characters to which texts are wrapped; 0 for no wrapping.
        widest: Largest width of the column of names.
        indent: Prefix of each line.
    """
    clean = [(without_control_characters(name), without_control_characters(text)) for name, text in rows]
    left = min(max((len(name) for name, _ in clean), default=0), widest, width // 2 or widest) + len(indent) + 2
    lines: list[str] = []
    for name, text in clean:
        texts = _wrapped(text, max(width - left, 30) if width else 0) or [""]
        if width and len(name) + len(indent) + 2 > left:
            whole = re.sub(r"\[[^]]*\]", lambda part: part[0].replace(" ", "\0"), name)  # [--jobs N] is not broken
            lines += [line.replace("\0", " ") for line in _wrapped(whole, width, indent, indent + " " * 4)]
        else:
            lines.append(f"{indent}{name}  ".ljust(left) + texts.pop(0))
        lines += [" " * left + more for more in texts]
    return [line.rstrip() for line in lines]


def bold(text: str) -> str:
    """Return text that a terminal shows in bold."""
    return f"\x1b[1m{text}\x1b[0m" if supports_colour(sys.stdout) else text


def _wrapped(text: str, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    """Wrap text between words to lines of a width (0 for no wrapping) that begin with an indent."""
    hanging = indent if hanging is None else hanging
    return wrap_words(text, width or sys.maxsize, initial_indent=indent, subsequent_indent=hanging)


def _width() -> int:
    """Return the width of lines on a terminal; 0 without one, where a row stays one line."""
    return line_width(sys.stdout) if sys.stdout.isatty() else 0


#: Default folders of options and of recipes.
CONFIGS, RECIPES = "my_configs", "my_recipes"

#: Groups whose options have a key ``name`` that records show.
_NAMED = ("precision", "dataset")


def copy_files(arguments: Namespace) -> int:
    """Copy an option or a recipe to a folder of the user, and print the command that uses the copy.

    Args:
        arguments: Parsed command line: ``GROUP/OPTION`` or ``RECIPE``, either followed by ``=NAME`` for the name of
            the copy, and optionally a folder. Without ``=NAME`` the copy of ``resnet18`` is ``my_resnet18``.

    Returns:
        The exit code 0.

    Raises:
        UsageError: There is no such option or recipe, or the name of the copy is taken or no file name.
        StorageError: The folder cannot be written.
    """
    words = arguments.words
    recipes = study.recipe_names() if (study := shelves.find("study")) else []
    source, equals, name = words[0].partition("=")
    group, _, option = source.rpartition("/")
    name = name if equals else f"my_{option}"
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(f"'{name}' cannot be the name of a copy", "use letters, digits, '_', '-' and '.'")
    if not group and source in recipes:
        folder = Path(*words[1:] or [RECIPES])
        _copy(recipes_folder() / source, folder / name, words[0])
        say(f"copied {folder / name}\nedit it, then: {shlex.join(['mptrain', 'reproduce', str(folder / name)])}")
        return EXIT_OK
    catalogue = Catalogue([configs_folder()])
    original = catalogue.groups.get(group, {}).get(option)
    if original is None:
        raise UsageError(
            f"there is no {f'option {source}' if group else f'recipe {source}'}", _near(source, catalogue, recipes)
        )
    if name in catalogue.groups[group]:
        raise UsageError(
            f"{group}={name} is mptrain's own, which --config-dir does not replace",
            f"choose another name: mptrain copy {source}=my_{name}",
        )
    folder = Path(*words[1:] or [CONFIGS])
    path = folder / group / f"{name}.yaml"
    _copy(original.path, path, words[0], renamed=_renamed(original, name))
    command = shlex.join(["mptrain", "--config-dir", str(folder), f"{group}={name}"])
    say(f"copied {path}\nedit it, then: {command}")
    return EXIT_OK


def _copy(source: Path, target: Path, word: str, renamed: str = "") -> None:
    """Copy a folder, or write the text of a copied file; an existing target, or one in a run, is an error."""
    require_outside_runs(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            with target.open("x", encoding="utf-8") as file:
                file.write(renamed)
    except FileExistsError as error:
        if not target.exists():  # a file is in the place of a parent folder
            raise StorageError(f"{target.parent} is not a folder", "choose another folder") from error
        hint = f"choose another name, mptrain copy {word.partition('=')[0]}=NAME, or another folder"
        raise UsageError(f"{target} exists, and copy replaces nothing", hint) from error
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}", "choose another folder") from error


def _renamed(option: ConfigOption, name: str) -> str:
    """Return the text of an option, with the new name where the option states its own name for records."""
    text = option.path.read_text(encoding="utf-8")
    if option.group not in _NAMED:
        return text
    return re.sub(rf"^(\s*name: ){re.escape(option.name)}(?=\s|$)", rf"\g<1>{name}", text, count=1, flags=re.MULTILINE)


def _near(source: str, catalogue: Catalogue, recipes: Sequence[str]) -> str:
    """Return the hint for something that cannot be copied."""
    group, _, name = source.rpartition("/")
    if group in catalogue.groups:
        names = [f"{group}/{option}" for option in near_names(name, catalogue.groups[group])]
        return f"did you mean {either(names)}?" if names else f"mptrain list {group} shows the options"
    if source in catalogue.groups:
        return f"write mptrain copy {source}/OPTION; mptrain list {source} shows the options"
    near = near_names(source, recipes)
    if not near or catalogue.options(name):
        options = dict.fromkeys(option for options in catalogue.groups.values() for option in options)
        near = [
            f"{option.group}/{option.name}"
            for close in near_names(name, options)
            for option in catalogue.options(close)
        ]
    more = "mptrain list shows groups and options, and mptrain list recipes the recipes"
    return f"did you mean {either(near)}?" if near else more
