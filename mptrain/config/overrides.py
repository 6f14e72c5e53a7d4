"""Parsing of command-line overrides, their problems before anything is composed, and what was meant by unknown keys.

Parsing knows the catalogue of groups and options, but no keys, types and ranges. Nothing here imports torch, but the
class or function to which an unknown key would belong may.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from mptrain.config.allowed_targets import PACKAGES, resolve
from mptrain.config.catalogue import SHARED, Catalogue, ConfigOption
from mptrain.config.schema import LEARNER_GROUPS, TARGET_GROUPS
from mptrain.config.synonyms import model_named, near_options, optimizer_named, translate
from mptrain.config.targets import DATA_FACTS, FACTS, parameters
from mptrain.config.value_checks import show
from mptrain.runlog.strict_json import DEEPEST, is_too_deep
from mptrain.system.errors import ConfigError, Problem, did_you_mean, either
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
    if len(words := word.split()) > 1 and all(re.fullmatch(r"[+~]{0,2}[\w./@]+=[\w./+-]+", each) for each in words):
        return None, Problem(f"'{word}' is {len(words)} words", f"give each on its own: {', '.join(words)}")
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
    """Quote a text as a value in Hydra's override grammar, where a backslash is an escape only before a quote.

    A path of plain letters stays as it is.
    """
    if "/" in text and re.fullmatch(r"[\w./][\w./+-]*", text, re.ASCII):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", r"\'"), text) + "'"


#: Characters that are allowed only in quoted values, with their names.
_IN_QUOTES = {"'": "a single quote", '"': "a double quote", "\n": "a line end", "\r": "a line end", "\t": "a tab"}


def _unquoted(word: str) -> Problem | None:
    """Return the problem of a plain text that Hydra can read only in quotes; None if quotes are not the reason."""
    key, _, value = word.partition("=")
    characters = [name for letter, name in _IN_QUOTES.items() if letter in value]
    if not characters or set(value) & set("[]{}()") or value[0] in "'\"":
        return None
    written = quoted(value)
    try:
        fits = OverridesParser.create().parse_override(f"{key}={written}").value() == value
    except HydraException:
        fits = False
    hint = f"set {shlex.quote(f'{key}={written}')}" if fits and value.isprintable() else "choose a value without it"
    return Problem(f"'{show(word)}' cannot be read: a value with {characters[0]} must be in quotes", hint)


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


#: Keys that have the same role in different options of a group.
COUNTERPARTS = {
    "scaler.scale": "scaler.init_scale",
    "scaler.init_scale": "scaler.scale",
    "dataset.path": "dataset.root",
    "dataset.root": "dataset.path",
}

#: Targets of optimizers and schedules whose files do not list all arguments, because ``name`` chooses the class.
_BY_NAME = (
    *("mptrain.optimizer.torch_optimizer", "mptrain.optimizer.timm_optimizer"),
    *("mptrain.schedule.torch_scheduler", "mptrain.schedule.timm_scheduler"),
)

#: Sentinel for a missing key.
_ABSENT = object()


def check_key(override: Override, tree: dict[str, Any], catalogue: Catalogue, known: Sequence[str]) -> Problem | None:
    """Return the problem of an override's key, such as an unknown one, or None if the key is valid.

    Args:
        override: The parsed override.
        tree: The composed configuration as plain containers, before any value was overridden.
        catalogue: All groups and options, to find the key elsewhere.
        known: Dotted keys that exist although no file names them (fields with defaults).
    """
    key, text = override.key_or_group, override.input_line or ""
    exists = has_key(tree, key) or key in known or (key.startswith("learners.") and key in known_keys(tree, key))
    section, _, rest = key.partition(".")
    open_ended = section in TARGET_GROUPS and bool(rest) and isinstance(tree.get(section), dict)
    if override.is_delete():
        if not exists:
            return Problem(f"'{text}': there is no key '{key}' to remove")
        if not open_ended or key.endswith("._target_") or not has_key(tree, key):
            return Problem(f"'{text}': {key} cannot be removed", "give it another value instead")
        return None
    if exists:
        if override.is_add() and not isinstance(override.value(), (dict, list)) and has_key(tree, key):
            return Problem(f"'{text}': {key} already exists", f"write {key}={show(override.value())}")
        return None
    if (own := re.match(r"(?:learners\.[^.]+\.)?(optimizer|schedule)\.\w+$", key)) and isinstance(
        tree.get(own[1]), dict
    ):
        path = str(tree[own[1]].get("_target_"))
        if path in _BY_NAME or not path.startswith("mptrain."):
            return None  # the signature of the class decides, when the target is checked
    parent = key.rpartition(".")[0]
    inside = [name for name in known if name.rpartition(".")[0] == parent or name.endswith(f".{key}")]
    if not isinstance(lookup(tree, parent), dict) and (guess := did_you_mean(key, inside)):
        return Problem(f"unknown key '{key}'", f"did you mean {guess}={show(override.value())}?")
    if (override.is_add() or override.is_force_add()) and open_ended and isinstance(lookup(tree, parent), dict):
        return None
    ancestors = [key[: match.start()] for match in re.finditer(r"\.", key)]
    if open_ended and any(lookup(tree, ancestor) == {} for ancestor in ancestors[1:]):  # such as model.arguments
        return None
    return unknown_key(key, override.value(), tree, catalogue)


def _unlikely(
    option: ConfigOption, usual: str | None, tree: dict[str, Any], catalogue: Catalogue
) -> tuple[bool, bool, bool]:
    """Return why an option is not the one meant, weightiest first: no default, not for own files, for other tasks."""
    chosen = f"_target_: {lookup(tree, 'task._target_')}"
    tasks = {name for name, task in catalogue.groups["task"].items() if chosen in map(str.strip, task.lines)}
    own = option.facts.get("needs", "").startswith("your own")
    return option.name != usual, not own, tasks.isdisjoint(option.tasks)


def unknown_key(key: str, value: Any, tree: dict[str, Any], catalogue: Catalogue) -> Problem:
    """Return the problem of an unknown configuration key, with a guess at the intended key as the hint.

    Args:
        key: The dotted key.
        value: The value given for it.
        tree: The composed configuration as plain containers.
        catalogue: All groups and options, to find the key elsewhere.
    """
    what = f"unknown key '{key}'"
    group = key.split(".")[0]
    if group == "learners" and (guess := did_you_mean(key, known_keys(tree, key))):
        return Problem(what, f"did you mean {guess}={show(value)}?")
    ours = str(lookup(tree, f"{group}._target_", "mptrain.")).startswith("mptrain.")
    if ours and (elsewhere := catalogue.options_with(key)):
        usual = catalogue.defaults.get(group)
        rank = {option.name: _unlikely(option, usual, tree, catalogue) for option in elsewhere}
        ranked = sorted(rank, key=rank.__getitem__)
        names = [f"{group}={name}" for name in ranked]
        chosen = " or ".join(names) if len(names) < 4 else f"{', '.join(names[:3])} or one of {len(names) - 3} more"
        what += f" in the chosen {group}: it belongs to {chosen}"
        counterpart = COUNTERPARTS.get(key, "")
        meant = not any(rank[ranked[0]][1:]) and not has_key(tree, counterpart)  # own files, for the chosen task
        likely = meant or ranked[0] == usual or len(names) < 4
        ways = [f"{names[0]} {key}={show(value)}"] if likely else []
        ways += [f"{counterpart}={show(value)} for the chosen {group}"] if has_key(tree, counterpart) else []
        return Problem(what, f"write {', or '.join(ways)}" if ways else f"choose {chosen}")
    if words := translate(key, show(value)):
        return Problem(what, f"did you mean {words}?")
    if guess := _guess(key, tree, catalogue):
        return Problem(what, f"did you mean {guess}={show(value)}?")
    if section := _like_a_section(key, tree):
        keys = [f"{section}.{name}" for name in tree[section] if not name.startswith("_")]
        return Problem(what, f"{section} is a section of keys: {', '.join(keys[:8])}{' and more' * (len(keys) > 8)}")
    parent = lookup(tree, key.rpartition(".")[0])
    if isinstance(parent, dict) and group in TARGET_GROUPS:
        return Problem(what, _appending(key, value, parent, tree))
    if isinstance(parent, dict) and parent is not tree and parent:
        return Problem(what, f"{key.rpartition('.')[0]} has {', '.join(parent)}")
    if parent is not None and not isinstance(parent, (dict, list)):
        return Problem(what, f"{key.rpartition('.')[0]} is a single value")
    return Problem(what, "mptrain list shows all groups and keys")


def has_key(tree: Any, key: str) -> bool:
    """Return whether a dotted key exists in nested dicts and lists; list entries are addressed by index (``a.0.b``)."""
    return bool(key) and lookup(tree, key, _ABSENT) is not _ABSENT


def lookup(tree: Any, key: str, absent: Any = None) -> Any:
    """Return the value at a dotted key in nested dicts and lists.

    Args:
        tree: The containers.
        key: Dotted key; a list entry is addressed by its index. An empty key is the whole tree.
        absent: Result for a missing key.
    """
    for part in key.split(".") if key else ():
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return absent
    return tree


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values in nested dicts that are not dicts themselves, in order.

    Args:
        tree: The nested dicts.
        prefix: Text before every key, with its dot.
    """
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def known_keys(tree: Mapping[str, Any], key: str) -> Iterator[str]:
    """Yield the valid configuration keys below ``learners.NAME``, the settings of a single learner.

    Args:
        tree: The composed configuration as plain containers; has the arguments of optimizer, schedule and scaler.
        key: A key ``learners.NAME...`` from which NAME is taken.
    """
    name = key.split(".")[1] if key.count(".") else "NAME"
    yield f"learners.{name}.clip_norm"
    for group in LEARNER_GROUPS:
        yield f"learners.{name}.{group}"
        for argument in (*(tree.get(group) or {}), *(entry.key.partition(".")[2] for entry in SHARED.get(group, ()))):
            yield f"learners.{name}.{group}.{argument}"


def _guess(key: str, tree: dict[str, Any], catalogue: Catalogue) -> str:
    keys = [name for name in leaves(tree) if not name.endswith("_target_") and not name.startswith("model.defaults.")]
    keys += [entry.key for entries in SHARED.values() for entry in entries]
    section, _, last = key.rpartition(".")
    if not section:
        tops = [*catalogue.groups, *(name for name in tree if not isinstance(tree[name], dict))]
        if guess := did_you_mean(key, tops):
            return guess
    names = {name.rpartition(".")[2]: name for name in reversed(keys)}
    if isinstance(lookup(tree, section), dict) and section:
        siblings = {name.rpartition(".")[2]: name for name in keys if name.rpartition(".")[0] == section}
        if guess := did_you_mean(last, siblings):
            return siblings[guess]
        return names.get(last, "")
    same_name = [name for name in keys if name.rpartition(".")[2] == last]
    if same_name:
        return did_you_mean(key, same_name) or same_name[0]
    if _like_a_section(key, tree):
        return ""
    return did_you_mean(key, keys) or names.get(did_you_mean(last, names), "")


def _like_a_section(key: str, tree: dict[str, Any]) -> str:
    """Return the section whose name resembles a key without a dot; empty if there is none."""
    return "" if "." in key else did_you_mean(key, [name for name in tree if isinstance(tree[name], dict)])


def _appending(key: str, value: Any, parent: dict[str, Any], tree: dict[str, Any]) -> str:
    """Return the hint for a new argument of a target: how to pass it, or the accepted ones. Imports the target."""
    path, name = parent.get("_target_"), key.rpartition(".")[2]
    write = f"set +{key}={show(value)}"
    if not isinstance(path, str):
        return write
    try:
        allow = (*PACKAGES[key.split(".")[0]], *(lookup(tree, "extensions.allow") or ()))
        accepted, open_ended = parameters(resolve(path, allow))
    except ConfigError:
        return f"set {key.rpartition('.')[0]}._target_=PATH: {path} cannot be imported"
    if name in accepted and name in DATA_FACTS and key.split(".")[0] in ("model", "task"):
        return f"leave it out: the data set determines it; +{key}={show(value)} passes another value"
    if open_ended or name in accepted:
        return f"{write} to pass it to {path}"
    for known, inner in parent.items():
        if isinstance(inner, dict) and known in accepted:
            return f"set {key.removesuffix(name)}{known}.{name}={show(value)} to pass it on"
    own = [known for known in accepted if known not in FACTS.get(key.split(".")[0], ())]
    return f"{path} takes {', '.join(own) or 'no arguments'}"
