"""Decisions about which code a configuration may call and what it may download.

Only overrides that the user typed decide, never a file. Runs, sweeps and folders of YAML are copied between machines,
and nothing in them proves who wrote them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from mptrain.config.overrides import ParsedOverrides, parse
from mptrain.config.schema import Config
from mptrain.config.value_checks import show
from mptrain.runlog.sweeps import Sweep
from mptrain.system.errors import ConfigError, Problem

_SECTION, _NAME = "extensions", "allow"
_KEY = f"{_SECTION}.{_NAME}"


def apply_typed_allow(node: DictConfig, words: Iterable[Override], where: str, allow: Sequence[str] = ()) -> None:
    """Set the packages that a configuration may call (``extensions.allow``) to the ones that the user typed, in place.

    Called before any class or function that the configuration names is imported, with the merged tree before the value
    overrides are applied. Raise ConfigError if the files, ``where`` in messages, allow packages that neither the
    overrides nor ``allow`` contain.
    """
    typed = [_given(word) for word in words if word.key_or_group in (_SECTION, _KEY)]
    typed = [value for value in typed if value is not None]
    if typed:  # an invalid value is reported when the section is checked
        node[_SECTION] = {_NAME: typed[-1] if _packages(typed[-1]) is not None else []}
        return
    said = _of_tree(node)
    packages = _packages(said)
    if packages is None or not set(packages) <= set(allow):
        raise ConfigError(untrusted_code(where, packages if packages is not None else [show(said)]))


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
    found: dict[str, dict[str, None]] = {"dataset": {"download": None} if ours else {}, "model": {}}
    for word in words.values:
        group, _, name = word.key_or_group.partition(".")
        if group in found and name and not word.is_delete():
            found[group][name] = None
    return {group: tuple(names) for group, names in found.items()}


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
    found: list[str] = []
    for word in words:
        override, _ = parse(word)
        key = word.partition("=")[0].lstrip("+~") if override is None else override.key_or_group
        if key.split(".")[0] != _SECTION:
            continue
        packages = None if override is None else _packages(_given(override))
        found += [word] if packages is None else packages
    return list(dict.fromkeys(found))


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
