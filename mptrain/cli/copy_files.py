"""``mptrain copy``: copies an option or a recipe of mptrain to a folder of the user, to be edited there."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain import shelves
from mptrain.cli.messages import say
from mptrain.config import location
from mptrain.config.catalogue import Catalogue, Option
from mptrain.runlog.directory import require_outside_runs
from mptrain.system.errors import EXIT_OK, StorageError, UsageError, either, near_names

if TYPE_CHECKING:
    from argparse import Namespace

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
        _copy(location.recipes() / source, folder / name, words[0])
        say(f"copied {folder / name}\nedit it, then: {shlex.join(['mptrain', 'reproduce', str(folder / name)])}")
        return EXIT_OK
    catalogue = Catalogue([location.configs()])
    found = catalogue.groups.get(group, {}).get(option)
    if found is None:
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
    _copy(found.path, path, words[0], renamed=_renamed(found, name))
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


def _renamed(option: Option, name: str) -> str:
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
        near = [f"{one.group}/{one.name}" for close in near_names(name, options) for one in catalogue.options(close)]
    more = "mptrain list shows groups and options, and mptrain list recipes the recipes"
    return f"did you mean {either(near)}?" if near else more
