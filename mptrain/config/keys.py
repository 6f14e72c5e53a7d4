"""Keys of a composed configuration: those that exist, and what was meant by one that does not.

Imports no torch, but the class or function to which an unknown key would belong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from mptrain.config.allowed_targets import PACKAGES, resolve
from mptrain.config.catalogue import SHARED, Catalogue, Option
from mptrain.config.schema import LEARNER_GROUPS, TARGET_GROUPS
from mptrain.config.synonyms import translate
from mptrain.config.targets import DATA_FACTS, FACTS, parameters
from mptrain.config.value_checks import show
from mptrain.system.errors import ConfigError, Problem, did_you_mean

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
    places = [key[: match.start()] for match in re.finditer(r"\.", key)]
    if open_ended and any(lookup(tree, place) == {} for place in places[1:]):  # such as model.arguments
        return None
    return unknown_key(key, override.value(), tree, catalogue)


def _unlikely(option: Option, usual: str | None, tree: dict[str, Any], catalogue: Catalogue) -> tuple[bool, bool, bool]:
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
        for argument in (*(tree.get(group) or {}), *(one.key.partition(".")[2] for one in SHARED.get(group, ()))):
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
