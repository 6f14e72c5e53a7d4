"""Whose code a configuration may call, and what it may download: what the person who types says, never what a file says.

Runs, sweeps and folders of YAML are copied from machine to machine, and nothing in them tells who wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from mptrain.config.overrides import ParsedOverrides, parse
from mptrain.config.schema import Config
from mptrain.config.value_checks import show
from mptrain.errors import ConfigError, Problem
from mptrain.runlog.sweeps import Sweep

_SECTION, _NAME = "extensions", "allow"
_KEY = f"{_SECTION}.{_NAME}"


def apply_typed_allow(node: DictConfig, words: Iterable[Override], where: str, allow: Sequence[str] = ()) -> None:
    """Let a merged tree say about ``extensions`` what was typed, in place, before anything that it names is imported.

    Args:
        node: The tree; what words say is not applied yet.
        words: Of the command line.
        where: What to call the files that the tree came from.
        allow: Packages that were confirmed before.

    Raises:
        ConfigError: The files let in code that neither the words nor ``allow`` let in.
    """
    typed = [_given(word) for word in words if word.key_or_group in (_SECTION, _KEY)]
    typed = [value for value in typed if value is not None]
    if typed:  # what is wrong with the value is said when it is checked
        node[_SECTION] = {_NAME: typed[-1] if _packages(typed[-1]) is not None else []}
        return
    said = _of_tree(node)
    packages = _packages(said)
    if packages is None or not set(packages) <= set(allow):
        raise ConfigError(untrusted_code(where, packages if packages is not None else [show(said)]))


def untrusted_code(where: str, packages: Sequence[str], line: str = "") -> Problem:
    """The problem with a file that lets in code of these packages; ``line`` is the command line to write, where it is known."""
    word = f"{_KEY}=[{','.join(packages)}]"
    add = f"write {line} '{word}'" if line else f"add '{word}' to the command line"
    return Problem(f"{where} lets in code that is not mptrain's: {word}", f"if you trust that code, {add}")


def allow_argument(packages: Sequence[str]) -> str:
    """What a line that names a run needs behind it, with a blank before; empty where the run has no code of others."""
    return f" '{_KEY}=[{','.join(packages)}]'" if packages else ""


def allow_argument_for(sweep: Sweep) -> str:
    """What a line that names a sweep, or a run of it, needs behind it (see `allow_argument`)."""
    return allow_argument(allowed_packages(word for job in sweep.jobs for word in job.overrides))


def download_arguments(words: ParsedOverrides, *, ours: bool) -> dict[str, tuple[str, ...]]:
    """Return the arguments of data set and model that may download something: those that were typed.

    Args:
        words: That the user typed.
        ours: The data set is one of mptrain's that the user chose, whose files say that it is downloaded.
    """
    found: dict[str, dict[str, None]] = {"dataset": {"download": None} if ours else {}, "model": {}}
    for word in words.values:
        group, _, name = word.key_or_group.partition(".")
        if group in found and name and not word.is_delete():
            found[group][name] = None
    return {group: tuple(names) for group, names in found.items()}


def allowed_downloads(config: Config) -> dict[str, tuple[str, ...]]:
    """Return what `download_arguments` returned when a configuration was made."""
    return {"dataset": config.dataset.fetch, "model": config.model.fetch}


def is_allow_override(word: str) -> bool:
    """Whether a word says whose code may be called, and nothing else."""
    return word.partition("=")[0].lstrip("+") == _KEY


def allowed_packages(words: Iterable[str]) -> list[str]:
    """The packages that words let in, each once; a value that cannot be read stands for itself."""
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
    """The whole list of packages that a word gives; None where it gives none."""
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
    """The packages in a list of plain names; None for anything else, such as what stands for another value."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) and "${" not in item for item in value):
        return [str(item) for item in value]
    return None
