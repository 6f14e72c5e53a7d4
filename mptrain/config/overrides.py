"""Parsing of command-line overrides, and their problems, before anything is composed.

Knows the catalogue of groups and options, but no keys (`mptrain.config.keys`), types and ranges. Imports no torch.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from mptrain.config.catalogue import Catalogue
from mptrain.config.schema import TARGET_GROUPS
from mptrain.config.synonyms import model_named, near_options, optimizer_named
from mptrain.config.value_checks import show
from mptrain.runlog.strict_json import DEEPEST, is_too_deep
from mptrain.system.errors import Problem, either
from mptrain.system.files import expanded

#: Groups that every run needs.
REQUIRED = (*TARGET_GROUPS, "precision")

#: Keys of Hydra's own configuration that mptrain uses (the sweeper) or answers itself.
_HYDRA_PARTS = ("hydra/sweeper", "hydra.sweeper", "hydra/launcher", "hydra.launcher")

_DIRECTORIES = [f"hydra.{name}" for name in ("run.dir", "sweep.dir", "sweep.subdir", "output_subdir", "job.chdir")]


def is_about_data(word: str) -> bool:
    """Return whether an override sets the data set, one of its keys, or the packages that may be called."""
    return word.lstrip("+~").partition("=")[0].partition(".")[0] in ("dataset", "extensions")


@dataclass(frozen=True)
class ParsedOverrides:
    """The parsed ``KEY=VALUE`` overrides of a command line.

    Attributes:
        groups: Overrides that choose an existing option of a group, such as ``model=resnet50``.
        values: Overrides of keys, such as ``train.epochs=3``.
        hydra: Overrides of Hydra's own configuration, as text.
        problems: Problems found so far.
    """

    groups: tuple[Override, ...]
    values: tuple[Override, ...]
    hydra: tuple[str, ...]
    problems: tuple[Problem, ...]

    def among(self, words: Sequence[str]) -> ParsedOverrides:
        """Return only the overrides of groups and keys whose text is one of ``words``."""
        groups = tuple(word for word in self.groups if word.input_line in words)
        values = tuple(word for word in self.values if word.input_line in words)
        return replace(self, groups=groups, values=values)


def read(words: Sequence[str], catalogue: Catalogue) -> ParsedOverrides:
    """Parse the overrides of a command line into choices of groups, values of keys, and Hydra's own.

    If a group is given twice, the last counts. Problems are collected, not raised.

    Args:
        words: Overrides as text, ``KEY=VALUE``.
        catalogue: All groups and options.
    """
    groups: dict[str, Override] = {}
    values: list[Override] = []
    hydra: list[str] = []
    problems: list[Problem] = []
    for word in words:
        override, problem = parse(word)
        if override is None:
            problems.append(problem or Problem(f"{word!r} cannot be read"))
            continue
        key = override.key_or_group
        if key.split(".")[0] == "hydra" or key.startswith("hydra/"):
            if key in _DIRECTORIES:
                what = f"'{key}' has no effect: mptrain creates the run directories"
                problems.append(Problem(what, "use run.root or run.name"))
            elif key == "hydra.searchpath":
                problems.append(Problem(f"'{key}' is set by mptrain", "add a folder with --config-dir DIR"))
            elif not key.startswith(_HYDRA_PARTS):
                problems.append(
                    Problem(f"'{key}' has no effect", "leave it out: of Hydra's own keys only those of a sweeper count")
                )
            else:
                hydra.append(word)
        elif override.is_sweep_override():
            problems.append(_several_values(word, override, catalogue))
        elif key in catalogue.groups and not isinstance(override.value(), dict):
            wrong = list(check_group(override, catalogue))
            problems += wrong
            if not wrong and override.value() is None and not override.is_delete():
                groups.pop(key, None)  # null for a group that has no default option
            elif not wrong:
                groups[key] = override
        else:
            values.append(override)
    return ParsedOverrides(tuple(groups.values()), tuple(values), tuple(hydra), tuple(problems))


def parse(word: str) -> tuple[Override | None, Problem | None]:
    """Parse one ``KEY=VALUE`` override with Hydra's grammar.

    Args:
        word: The override as text.

    Returns:
        The override and None, or None and the problem if it cannot be parsed.
    """
    if "=" not in word and not word.startswith("~"):
        return None, Problem(f"'{show(word)}' is not of the form KEY=VALUE", "write for example train.epochs=3")
    try:
        override = OverridesParser.create().parse_override(word)
        value = override.value()  # functions such as int() are evaluated here
    except (HydraException, RecursionError, ValueError, TypeError, ArithmeticError) as error:
        if unquoted := _unquoted(word):
            return None, unquoted
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = re.sub(r" expecting \{.*\}| at: '<EOF>'", "", reason).replace(
            "mismatched input '<EOF>'", "it ends too early"
        )
        reason = re.sub(r"token recognition error at: ('[^']')$", r"\1 must be in quotes", reason)
        return None, Problem(f"'{show(word)}' cannot be read: {reason}", _readable(word))
    if is_too_deep(value):
        return None, Problem(
            f"'{show(word)}' is nested deeper than {DEEPEST} levels", "write a value with fewer brackets"
        )
    if not override.key_or_group:
        return None, Problem(f"'{show(word)}' has no key", "write KEY=VALUE, for example train.epochs=3")
    return override, None


def _readable(word: str) -> str:
    """Return the hint for an unreadable override: a power of two as a number, no stray characters, or quotes."""
    key, _, value = (part.strip() for part in word.partition("="))
    if not re.fullmatch(r"[+~]{0,2}[\w./@]+", key, re.ASCII):
        is_path = os.path.exists(word)  # noqa: PTH110 - Path.exists raises if it is too long
        return "it is the path of a file or folder, and only KEY=VALUE can stand there" if is_path else ""
    if re.fullmatch(r"2\^-?\d{1,3}", value):
        return f"write {key}={2.0 ** int(value[2:]):.15g}"
    if re.fullmatch(r"\([^()]*\)", value):
        return f"write {key}=[{value[1:-1]}]"
    bare = value.strip("=,; ")
    if re.fullmatch(r"[\w.+-]+", bare, re.ASCII):
        return f"write {key}={bare}"
    plain = value.isprintable() and not set(value) & set("[]{}()\\'\"")
    return f"quote the value: '{key}=\"{value if plain else '...'}\"'"


def quoted(text: str) -> str:
    """Quote a text as a value in Hydra's override grammar, where a backslash is an escape only before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", r"\'"), text) + "'"


#: Characters that are allowed only in quoted values, with their names.
_IN_QUOTES = {"'": "a single quote", '"': "a double quote", "\n": "a line end", "\r": "a line end", "\t": "a tab"}


def _unquoted(word: str) -> Problem | None:
    """Return the problem of a plain text that Hydra can read only in quotes; None if quotes are not the reason."""
    key, _, value = word.partition("=")
    found = [name for letter, name in _IN_QUOTES.items() if letter in value]
    if not found or set(value) & set("[]{}()") or value[0] in "'\"":
        return None
    written = quoted(value)
    try:
        fits = OverridesParser.create().parse_override(f"{key}={written}").value() == value
    except HydraException:
        fits = False
    hint = f"set {shlex.quote(f'{key}={written}')}" if fits and value.isprintable() else "choose a value without it"
    return Problem(f"'{show(word)}' cannot be read: a value with {found[0]} must be in quotes", hint)


def check_group(override: Override, catalogue: Catalogue) -> Iterator[Problem]:
    """Yield the problems of an override that chooses an option of a group, such as ``model=resnet50``.

    Args:
        override: The parsed override.
        catalogue: All groups and options.
    """
    group, value = override.key_or_group, override.value()
    options = catalogue.groups[group]
    needed = group in REQUIRED or catalogue.defaults.get(group) is not None
    if override.package is not None:
        yield Problem(f"'{override.input_line}': the package of {group} is fixed", f"write {group}={show(value)}")
    elif override.is_delete():
        if needed:
            yield Problem(f"'{override.input_line}': a run needs an option of {group}", _instead(group, catalogue))
    elif override.is_add() and group in catalogue.defaults:
        yield Problem(f"'{override.input_line}': {group} already has an option", f"write {group}={show(value)}")
    elif value is None:
        if needed:
            yield Problem(f"{group}=null: a run needs an option of {group}", _instead(group, catalogue))
    elif isinstance(value, list):
        yield Problem(f"{group}={show(value)}: only one option of a group can be chosen", _options(catalogue, group))
    elif show(value) not in options:
        yield Problem(f"no option '{show(value)}' in {group}", _meant(group, show(value), catalogue))


def _meant(group: str, word: str, catalogue: Catalogue) -> str:
    """Return the hint for a word that is not an option of the group."""
    options = catalogue.groups[group]
    own = _of_ones_own(group, word, catalogue)
    if own:
        return own
    if group == "model" and not any(word.lower() in name for name in options) and (words := model_named(word)):
        return f"did you mean {words}?"
    if group == "optimizer" and word.lower() not in options and (words := optimizer_named(word)):
        return f"did you mean {words}?"
    guesses = near_options(group, word, list(options))
    if not guesses:
        return _options(catalogue, group)
    guesses.sort(key=lambda name: name != catalogue.defaults.get(group))
    question = f"did you mean {either(guesses)}?"
    return f"{question} mptrain help {group} describes them" if guesses[1:] else question


def _of_ones_own(group: str, word: str, catalogue: Catalogue) -> str:
    """Return the hint for a path or a dotted name given as an option, which means code or data of the user's own."""
    if "/" in word or word.endswith((".yaml", ".yml", ".py")):
        if group == "dataset" and expanded(word).is_dir():
            return f"for images with one folder per class set dataset=image_folder dataset.root={word}"
        return f"for an option of your own, save it as DIR/{group}/NAME.yaml and write --config-dir DIR {group}=NAME"
    if group in TARGET_GROUPS and all(part.isidentifier() for part in word.split(".")) and "." in word:
        return how_to_choose(word, group, catalogue)
    return ""


def how_to_choose(path: str, group: str, catalogue: Catalogue) -> str:
    """Return the hint how to choose a class or function for a group: an option that finds it by name, or a file.

    Args:
        path: Dotted path of the class or function.
        group: Name of the group, such as ``optimizer``.
        catalogue: All groups and options.
    """
    package, name = path.split(".")[0], path.rpartition(".")[2]
    if package in catalogue.groups[group]:
        return f"write {group}={package} {group}.name={name}"
    file = f"save DIR/{group}/NAME.yaml with '_target_: {path}' and its own keys"
    return f"{file}, and write --config-dir DIR {group}=NAME (docs/bring-your-own.md)"


def _options(catalogue: Catalogue, group: str) -> str:
    own = "" if catalogue.has_own_folders else "; an option of your own needs --config-dir DIR"
    return f"the options are {', '.join(catalogue.groups[group])}{own}"


def _instead(group: str, catalogue: Catalogue) -> str:
    """Return the hint for a group that cannot be left out: write its option ``none``, or its default."""
    options = catalogue.groups[group]
    name = "none" if "none" in options else catalogue.defaults.get(group) or next(iter(options))
    summary = options[name].summary.rstrip(".") if name in options else ""
    return f"write {group}={name}" + (f" ({summary})" if summary else "")


def _several_values(word: str, override: Override, catalogue: Catalogue) -> Problem:
    value = override.value()
    count = len(getattr(value, "list", ()))
    number = "two values" if count == 2 else "several values"
    listed = word.split("=", 1)[1]
    hint = f"set {override.key_or_group}=[{listed}] to pass one list" if count else ""
    if override.key_or_group in catalogue.groups:
        hint = ""  # only one option of a group can be chosen
    return Problem(f"{word}: {number} for one key: add -m to sweep", hint)
