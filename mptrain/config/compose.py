"""Composition of command-line overrides into a `Config`, and decisions about which code it may call and download.

Hydra merges the files of the chosen groups. mptrain's own modules check keys, types, ranges and targets, because Hydra
stops at the first problem and checks no ranges.

What a configuration may call and download is decided by overrides that the user typed, never by a file. Runs, sweeps
and folders of YAML are copied between machines, and nothing in them proves who wrote them.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from mptrain.config.assemble import assemble, wrong_words
from mptrain.config.catalogue import RECHOSEN, Catalogue, ConfigOption, configs_folder
from mptrain.config.overrides import ParsedOverrides, parse, read
from mptrain.config.schema import Config
from mptrain.config.targets import Given
from mptrain.config.value_checks import first_line, show
from mptrain.config.yaml_files import find_endless, find_unreadable, read_yaml
from mptrain.runlog.directory import refuse_other_version
from mptrain.runlog.run_paths import WATCHED
from mptrain.runlog.sweeps import Sweep
from mptrain.system.errors import ConfigError, Problem, StorageError

_SECTION, _NAME = "extensions", "allow"
_KEY = f"{_SECTION}.{_NAME}"


def apply_typed_allow(
    node: DictConfig, words: Iterable[Override], where: str, allow: Sequence[str] = (), *, given: bool = False
) -> list[str]:
    """Set the packages that a configuration may call (``extensions.allow``) to the ones that the user typed, in place.

    Called before any class or function that the configuration names is imported, with the merged tree before the value
    overrides are applied. Raise ConfigError if the files, ``where`` in messages, allow packages that neither the
    overrides nor ``allow`` contain.

    If a Python program has given parts, ``given``, files allow nothing instead, and the packages that they would allow
    are returned: the program's own code needs no permission, and any other is refused by its own name.
    """
    typed = [_given(word) for word in words if word.key_or_group in (_SECTION, _KEY)]
    typed = [value for value in typed if value is not None]
    if typed:  # an invalid value is reported when the section is checked
        node[_SECTION] = {_NAME: typed[-1] if _packages(typed[-1]) is not None else []}
        return []
    from_files = _of_tree(node)
    packages = _packages(from_files)
    if packages and given and isinstance(section := node[_SECTION], DictConfig):
        section[_NAME] = []
        return packages
    if packages is None or not set(packages) <= set(allow):
        raise ConfigError(untrusted_code(where, packages if packages is not None else [show(from_files)]))
    return []


def untrusted_code(where: str, packages: Sequence[str], line: str = "") -> Problem:
    """Return the problem of a configuration file that allows code of packages outside mptrain, for the user to allow.

    ``line`` is the command line to repeat with the override that allows them; empty if unknown.
    """
    word = f"{_KEY}=[{','.join(packages)}]"
    add = f"write {command_with(line, packages)}" if line else f"add '{word}' to the command line"
    return Problem(f"{where} runs code from outside mptrain: {word}", f"if you trust that code, {add}")


def allow_argument(packages: Sequence[str]) -> str:
    """Return the override ``extensions.allow`` for a run's packages, quoted and after a blank; empty without any."""
    return f" '{_KEY}=[{','.join(packages)}]'" if packages else ""


def search_path(packages: Sequence[str]) -> str:
    """Return the prefix ``PYTHONPATH=...`` that a command on a run needs to find the packages that it calls.

    It is empty without packages, or if ``PYTHONPATH`` is not set.
    """
    path = os.environ.get("PYTHONPATH", "")
    return f"PYTHONPATH={shlex.quote(path)} " if packages and path else ""


def command_with(command: str, packages: Sequence[str]) -> str:
    """Return a command on a run with what the run's packages need: `search_path` before, `allow_argument` after it.

    The command ends where another override may follow.
    """
    return f"{search_path(packages)}{command}{allow_argument(packages)}"


def packages_of(sweep: Sweep) -> list[str]:
    """Return the packages that the jobs of a sweep allow, without duplicates."""
    return allowed_packages(word for job in sweep.jobs for word in job.overrides)


def download_arguments(words: ParsedOverrides, *, ours: bool) -> dict[str, tuple[str, ...]]:
    """Return the arguments of data set and model that the user typed and that may thus download files, by group.

    If ``ours``, the user chose one of mptrain's data sets, which may download as their files say.
    """
    arguments: dict[str, dict[str, None]] = {"dataset": {"download": None} if ours else {}, "model": {}}
    for word in words.values:
        group, _, name = word.key_or_group.partition(".")
        if group in arguments and name and not word.is_delete():
            arguments[group][name] = None
    return {group: tuple(names) for group, names in arguments.items()}


def allowed_downloads(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the result of `download_arguments` that a configuration has stored."""
    return {"dataset": config.dataset.fetch, "model": config.model.fetch}


def is_allow_override(word: str) -> bool:
    """Return whether an override sets ``extensions.allow``, the packages that a configuration may call."""
    return word.partition("=")[0].lstrip("+") == _KEY


def allowed_packages(words: Iterable[str]) -> list[str]:
    """Return the packages that overrides of ``extensions.allow`` name, without duplicates.

    Other keys are ignored, and an unreadable override is returned as it is.
    """
    allowed: list[str] = []
    for word in words:
        override, _ = parse(word)
        key = word.partition("=")[0].lstrip("+~") if override is None else override.key_or_group
        if key.split(".")[0] != _SECTION:
            continue
        packages = None if override is None else _packages(_given(override))
        allowed += [word] if packages is None else packages
    return list(dict.fromkeys(allowed))


def _given(word: Override) -> Any:
    if word.is_delete():
        return None
    value = word.value()
    if word.key_or_group == _KEY:
        return value if value is not None else []
    return value.get(_NAME) if word.key_or_group == _SECTION and isinstance(value, dict) else None


def _of_tree(node: DictConfig) -> Any:
    child = node._get_node(_SECTION)
    if child is None:
        return []
    section = OmegaConf.to_container(child, resolve=False) if OmegaConf.is_config(child) else child._value()
    if isinstance(section, dict):
        section = section.get(_NAME)
    return section if section is not None else []


def _packages(value: Any) -> list[str] | None:
    """Return the packages in a list of plain names; None for anything else, such as an interpolation."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) and "${" not in item for item in value):
        return [str(item) for item in value]
    return None


#: Hint for ``--config-dir``.
FOLDER_HINT = "give the folder that holds GROUP/OPTION.yaml, for example ./mine with ./mine/model/net.yaml in it"

#: Merged files and the map from group to option, for each choice of options.
_Merged: TypeAlias = dict[tuple[str, ...], tuple[DictConfig, dict[str, str]]]

#: Those of mptrain's own files, by folder, time of its last change, and name of the top-level file.
_OURS: dict[tuple[Path, int, str], _Merged] = {}

#: Exceptions that Hydra, OmegaConf and PyYAML raise for invalid files and overrides.
COMPOSITION_ERRORS = (
    *(HydraException, OmegaConfBaseException, YAMLError, OSError),
    *(ValueError, TypeError, AttributeError, AssertionError, RecursionError),  # about hydra/launcher=0, for one
)


def compose(
    overrides: Sequence[str],
    *,
    config_dirs: Sequence[Path | str] = (),
    config_name: str = "train",
    given: Mapping[str, Given] = MappingProxyType({}),
) -> Config:
    """Compose and check the configuration of a training command line.

    The overrides are ``KEY=VALUE`` in Hydra's grammar, without flags. ``config_dirs`` are folders with further groups
    and options, searched after mptrain's own. ``config_name`` is the top-level file, without ``.yaml``. ``given`` maps
    groups to what a Python program gives in place of an option.
    """
    return Composer(config_dirs, config_name).compose(overrides, given)


def reload_watched(text: str, overrides: Sequence[str] = ()) -> Config:
    """Compose the default configuration with the loss scaling of a watched loop, for replays of it.

    ``text`` is the ``config.yaml`` of the watched loop; its rule is that of `torch.amp.GradScaler`. Raise ConfigError
    if it is damaged.
    """
    tree = read_yaml(text)
    try:
        rule = {key: repr(float(value)).removesuffix(".0") for key, value in tree.get("scaler", {}).items()}
        compute = tree.get("precision", {}).get("compute", "float16" if rule else "float32")
        precision = {"float16": "amp_dynamic", "bfloat16": "amp_bf16", "float32": "fp32"}[compute]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the saved configuration of the watched loop is damaged: {error!r}") from error
    own = [f"scaler.{key}={value}" for key, value in rule.items()]
    scaler = ["scaler=torch", *own] if rule else ["scaler=none", "scaler.on_overflow=apply"]
    config = compose([f"precision={precision}", *scaler])
    return recompose(config.tree, overrides)


def reload(
    text: str,
    overrides: Sequence[str] = (),
    *,
    allow: Sequence[str] = (),
    fetch: Mapping[str, Sequence[str]] = MappingProxyType({}),
    given: Mapping[str, Given] = MappingProxyType({}),
) -> Config:
    """Load the configuration of a finished or interrupted run from its ``config.yaml``, and apply overrides.

    Args:
        text: The saved YAML text (`Config.yaml`).
        overrides: Overrides of values, or of options of the groups in `RECHOSEN`. The model, dataset and task of a
            run cannot change.
        allow: Packages whose code the user has already allowed. Packages that the text allows must be among them,
            unless an override allows them (see `mptrain.config.compose`).
        fetch: Arguments that the user has already allowed to download files, by
            group (see `mptrain.config.compose.allowed_downloads`).
        given: Maps groups to what a Python program gives in place of the class or function on record.
    """
    try:
        tree = read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"the saved configuration cannot be read: {error}", error.hint) from error
    if not isinstance(tree, dict):
        raise ConfigError("the saved configuration is not a mapping")
    if WATCHED in tree:
        raise StorageError(
            "the run was trained by a loop that mptrain.watch recorded: it has no configuration and no checkpoints",
            "report, recommend, replay and compare read it; mptrain.diagnose(model, loss_fn, batch) examines a step",
        )
    return recompose(tree, overrides, allow=allow, fetch=fetch, given=given)


def recompose(
    tree: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    allow: Sequence[str] = (),
    fetch: Mapping[str, Sequence[str]] = MappingProxyType({}),
    given: Mapping[str, Given] = MappingProxyType({}),
) -> Config:
    """Apply overrides to a whole configuration (`Config.tree`), as `reload` does to the text of a saved one."""
    node = OmegaConf.create(tree)
    composer = Composer()
    words = read(overrides, composer.catalogue)
    problems = list(words.problems)
    for word in words.groups:
        if (group := word.key_or_group) not in RECHOSEN:
            what = f"{word.input_line}: the {group} of a saved run cannot change"
            problems.append(Problem(what, "start a new run, with model.weights=RUN to keep the weights"))
    for word in words.values:
        if word.key_or_group.partition(".")[0] == "run":
            what = f"{word.input_line} has no effect on a saved run: its directory is fixed"
            problems.append(Problem(what, "leave it out; to move a run, move its folder"))
    for text in words.hydra:
        what = f"{text} has no effect on a saved run: its configuration is already composed"
        problems.append(Problem(what, "leave it out"))
    words = dataclasses.replace(words, problems=tuple(problems))
    unused = apply_typed_allow(node, words.values, "the saved configuration", allow, given=bool(given))
    if words.groups and not words.problems:
        composer.choose_again(node, [str(word.input_line) for word in words.groups])
    fetch = fetch or download_arguments(words, ours=False)
    config = assemble(node, {}, words, composer.catalogue, tuple(overrides), fetch, given)
    if unused:  # for the record: the command line, where nothing is given, needs them
        config.tree[_SECTION][_NAME] = unused
    return config


class Composer:
    """Composer of command lines over fixed folders of YAML files, merged once for each choice of options.

    Args:
        config_dirs: Folders with further groups and options, searched after mptrain's own.
        config_name: The top-level file, without ``.yaml``.
        typed: Overrides that the user typed, if others come from a file; only typed ones may download. None means all.

    Raises:
        ConfigError: A folder does not exist, or no folder has the top-level file.
    """

    def __init__(
        self, config_dirs: Sequence[Path | str] = (), config_name: str = "train", typed: Sequence[str] | None = None
    ) -> None:
        #: See ``typed``.
        self.typed = None if typed is None else tuple(typed)
        named = ("--config-name", config_name) if config_name != "train" else ()
        self._flags = (*(word for folder in config_dirs for word in ("--config-dir", str(folder))), *named)
        #: Name of the top-level file, without its suffix.
        self.name = config_name.removesuffix(".yaml")
        folders = [configs_folder(), *(Path(folder).absolute() for folder in config_dirs)]
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"--config-dir {folder}: there is no such folder", FOLDER_HINT)
            refuse_other_version(folder)  # a run directory can be named here, for its config.yaml
        if problem := find_endless(folders[1:]):
            raise ConfigError(problem)
        # Hydra looks for the top-level file in its first folder only.
        self._folders = sorted(folders, key=lambda folder: not (folder / f"{self.name}.yaml").exists())
        #: All groups and options in these folders.
        self.catalogue = Catalogue(self._folders, root=self.name)
        if self.name not in self.catalogue.tops:
            there_is = ", ".join(self.catalogue.tops)
            raise ConfigError(f"--config-name {self.name}: no such file", f"choose one of {there_is}")
        self._require_own_places()
        changed = max(path.stat().st_mtime_ns for path in folders[0].rglob("*.yaml"))
        self._merged: _Merged = {} if config_dirs else _OURS.setdefault((folders[0], changed, self.name), {})

    def compose(self, overrides: Sequence[str], given: Mapping[str, Given] = MappingProxyType({})) -> Config:
        """Compose and check the configuration of one command line, with what a Python program gives by group."""
        node, chosen, words = self._read(overrides)
        for group, part in given.items():
            if node[group].get("_target_") != part.path:  # none of the keys of the option is meant for it
                node[group], chosen[group] = {"_target_": part.path}, part.path
        typed = words if self.typed is None else words.among(self.typed)
        fetch = download_arguments(typed, ours=self._chose_data(chosen, typed))
        config = assemble(node, chosen, words, self.catalogue, tuple(overrides), fetch, given)
        return dataclasses.replace(config, flags=self._flags)

    def require_keys(self, overrides: Sequence[str]) -> None:
        """Check keys and values of a command line's overrides, as far as that is possible without importing torch."""
        node, chosen, words = self._read(overrides)
        if problems := wrong_words(node, chosen, words, self.catalogue):
            raise ConfigError(problems)

    def _read(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str], ParsedOverrides]:
        words = read(overrides, self.catalogue)
        try:
            node, chosen = self._merge([*(str(word.input_line) for word in words.groups), *words.hydra])
        except COMPOSITION_ERRORS as error:
            raise ConfigError([*words.problems, self._explain(error, words)]) from error
        apply_typed_allow(node, words.values, "a chosen file")
        return node, chosen, words

    def _chose_data(self, chosen: dict[str, str], words: ParsedOverrides) -> bool:
        """Return whether the data set is one of mptrain's, chosen by a typed override or by mptrain's files alone."""

        def is_ours(option: ConfigOption | None) -> bool:
            return option is not None and option.path.is_relative_to(configs_folder())

        options = {group: self.catalogue.groups.get(group, {}).get(name) for group, name in chosen.items()}
        typed = any(word.key_or_group == "dataset" for word in words.groups)
        return is_ours(options.get("dataset")) and (
            typed or (self.typed is None and all(map(is_ours, (self.catalogue.tops[self.name], *options.values()))))
        )

    def _explain(self, error: Exception, words: ParsedOverrides) -> Problem:
        named = {word.key_or_group: str(word.value()) for word in words.groups}
        options = [self.catalogue.tops[self.name]]
        for group, name in {**self.catalogue.defaults, **named}.items():
            if name and (option := self.catalogue.groups.get(group, {}).get(name)):
                options.append(option)
        if problem := find_unreadable(option.path for option in options):
            return problem
        if isinstance(error, YAMLError):  # Hydra's loader is stricter, for example about duplicate keys
            mark = getattr(error, "problem_mark", None)
            location = f"{mark.name}, line {mark.line + 1}: " if mark else ""
            return Problem(
                f"{location}{getattr(error, 'problem', None) or first_line(error)}", "correct that file" if mark else ""
            )
        if words.hydra:
            return Problem(first_line(error), f"check {', '.join(map(show, words.hydra))}")
        if match := re.match(r"(?:In '(?P<file>[^']+)': )?Could not override '(?P<group>[^'@]+)(?P<at>@)?", str(error)):
            group, file = match["group"], match["file"]
            if file and match["at"]:  # the group was looked for inside the package of the file
                own_group = file.partition("/")[0]
                hint = f"begin {file}.yaml with '# @package _global_', and write its own keys below '{own_group}:'"
                return Problem(f"{file}.yaml cannot override the option of {group}", hint)
            if group in named:
                return Problem(f"{group} is not among the groups of {self.name}.yaml", f"write +{group}={named[group]}")
        own = [str(option.path) for option in options if not option.path.is_relative_to(configs_folder())]
        return Problem(first_line(error), f"check {', '.join(own)}" if own else "")

    def choose_again(self, node: DictConfig, choices: Sequence[str]) -> None:
        """Replace groups of a saved configuration, such as its precision, with other options, in place.

        Settings of single learners for a replaced group are dropped, because they belong to the replaced option. The
        choices are ``GROUP=OPTION`` for groups in `RECHOSEN`.
        """
        fresh, chosen = self._merge(choices)
        asked = [word.split("=", 1)[0] for word in choices]
        for group in dict.fromkeys([*asked, *(other for name in asked for other in RECHOSEN[name])]):
            node[group] = fresh._get_node(group)
            for learner in (node.get("learners") or {}).values():  # these keys belong to the replaced option
                learner.pop(group, None)
            OmegaConf.update(node, f"chosen.{group}", chosen[group], force_add=True)

    def _require_own_places(self) -> None:
        """Refuse a top-level file that sets ``hydra.searchpath``, because ``pkg://NAME`` in it imports NAME."""
        path = self.catalogue.tops[self.name].path
        if path.is_relative_to(configs_folder()):
            return
        try:
            urls = OmegaConf.select(OmegaConf.load(path), "hydra.searchpath")
        except OmegaConfBaseException as error:
            raise ConfigError(find_unreadable([path]) or f"{path}: {first_line(error)}") from error
        except COMPOSITION_ERRORS:  # reported by compose
            return
        if urls is not None:
            raise ConfigError(f"{path}: 'hydra.searchpath' is set by mptrain", "add a folder with --config-dir DIR")

    @contextmanager
    def opened(self) -> Iterator[list[str]]:
        """Initialise Hydra in a context, and yield the overrides that make it search all of the composer's folders."""
        first, *others = self._folders
        urls = ",".join(f"'file://{folder}'" for folder in others)
        with initialize_config_dir(str(first), version_base="1.3"):
            yield [f"hydra.searchpath=[{urls}]"] if urls else []

    def _merge(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
        """Merge the chosen files with Hydra; return copies of the tree and of the map from group to option."""
        key = tuple(overrides)
        if key not in self._merged:
            with self.opened() as search:
                node = hydra_compose(self.name, overrides=[*key, *search], return_hydra_config=True)
            choices = cast("dict[str, Any]", OmegaConf.to_container(node.hydra.runtime.choices))
            chosen = {
                str(group): str(option)
                for group, option in choices.items()
                if option is not None and not str(group).startswith("hydra/")
            }
            OmegaConf.set_readonly(node, False)
            OmegaConf.set_struct(node, False)
            node.pop("hydra")
            self._merged[key] = node, chosen
        node, chosen = self._merged[key]
        return copy.deepcopy(node), dict(chosen)
