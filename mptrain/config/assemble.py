"""Construction of a `Config` from a merged tree: applies overrides, resolves interpolations, collects problems.

torch is imported only if checking a target needs it. Targets are not checked while other problems are known, so those
are reported without importing torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mptrain.config.allowed_targets import PACKAGES, is_allowed
from mptrain.config.catalogue import SHARED, Catalogue
from mptrain.config.overrides import ParsedOverrides, check_key, how_to_choose
from mptrain.config.schema import SECTIONS, TARGET_GROUPS, Config, GeneralOptions, LearnerChoices
from mptrain.config.section_checks import (
    check_compatible,
    check_emulation,
    check_target,
    check_train,
    keys_of,
    read_learners,
    warnings_about,
)
from mptrain.config.targets import Given, Target, parameters
from mptrain.config.value_checks import HEADER, UNRESOLVED, check_field, check_section, fields_of, first_line, show
from mptrain.system.errors import ConfigError, Problem
from mptrain.system.masking import masked

_GENERAL = tuple(field.name for field in fields_of(GeneralOptions))
#: Keys of targets that are no arguments of them.
_BESIDE = tuple(entry.key for entries in SHARED.values() for entry in entries)
_FIELDS = tuple(key for name, schema in SECTIONS.items() for key in keys_of(name, schema))


def assemble(
    node: DictConfig,
    chosen: dict[str, str],
    words: ParsedOverrides,
    catalogue: Catalogue,
    overrides: tuple[str, ...],
    fetch: Mapping[str, Sequence[str]],
    given: Mapping[str, Given] = MappingProxyType({}),
) -> Config:
    """Apply the overrides of a command line to merged YAML files, check everything and return the configuration.

    Args:
        node: The merged files, before the value overrides are applied. Changed in place.
        chosen: Maps group to option. If an override replaces the target of a group, its path is stored instead.
        words: The parsed command line, with the problems found so far.
        catalogue: All groups and options, for suggestions.
        overrides: The command line as it was written.
        fetch: Maps group to the arguments of its target that may download
            files (see `mptrain.config.compose.download_arguments`).
        given: Maps group to what a Python program gives in place of its target.
    """
    problems = list(words.problems)
    filed = _target_paths(node)
    _apply_values(node, words, catalogue, problems, tuple(_keys_of_given(given)))
    replaced = {group: path for group, path in _target_paths(node).items() if path != filed.get(group)}
    tree = cast("dict[str, Any]", resolve(node, "", problems))
    # A saved configuration records its chosen options.
    chosen = {**(tree.pop("chosen", None) or {}), **chosen, **replaced}
    general, sections = _read_sections(tree, chosen, catalogue, problems)
    defaults = tree["model"].pop("defaults", None) or {} if isinstance(tree.get("model"), dict) else {}
    targets = _read_targets(tree, sections["extensions"], problems, given)
    for path in sections["extensions"].sinks if sections["extensions"] else ():
        try:
            Target(path, {}, sections["extensions"].allow).resolve()
        except ConfigError as error:
            problems += error.problems
    targets = {name: dataclasses.replace(target, fetch=tuple(fetch.get(name, ()))) for name, target in targets.items()}
    weights, facts = _take_weights(targets, problems), _take_facts(targets, problems)
    freeze = _take_freeze(targets, problems)
    if not problems or _touches_targets(words):  # otherwise a mistyped key is reported only after importing torch
        typed = {word.key_or_group for word in words.values}
        targets = _check_targets(targets, dict.fromkeys(replaced, typed), catalogue, problems)
    engine = sections["train"].engine if sections["train"] else ""
    if sections["precision"] and "optimizer" in targets:
        problems += check_compatible(sections["precision"], targets["optimizer"], engine)
    learner_nodes = tree.get("learners") or {}
    learners: dict[str, LearnerChoices] = {}
    if sections["train"] and sections["precision"]:
        problems += check_emulation(sections["precision"], sections["train"])
    if sections["train"]:
        problems += check_train(sections["train"])
        if not problems:
            learners = read_learners(learner_nodes, targets, sections["train"], problems)
    for learner in learners.values():
        problems += check_compatible(sections["precision"], learner.optimizer, engine)
    if problems:
        raise ConfigError([_explained(problem, chosen, catalogue) for problem in dict.fromkeys(problems)])
    model_options: dict[str, Any] = {"defaults": defaults} if defaults else {}
    if weights is not None:
        model_options["weights"] = str(weights)
    if freeze:
        model_options["freeze"] = list(freeze)
    if facts is not None:
        model_options["facts"] = facts
    whole = _whole_tree(general, targets, {**sections, "learners": learner_nodes}, model_options, chosen)
    if unreadable := list(_interpolations(whole)):
        raise ConfigError(unreadable)
    parts: dict[str, Any] = {**targets, **sections, **{name: getattr(general, name) for name in _GENERAL}}
    return Config(
        **parts,
        weights=weights,
        freeze=freeze,
        learners=learners,
        tree=whole,
        overrides=overrides,
        chosen=chosen,
        model_defaults=defaults,
        warnings=tuple(warnings_about(targets["scaler"], {word.key_or_group for word in words.values})),
    )


def wrong_words(
    node: DictConfig, chosen: dict[str, str], words: ParsedOverrides, catalogue: Catalogue
) -> list[Problem]:
    """Return the problems of a configuration's keys and values that can be found without importing torch.

    Classes and functions that the configuration names are not resolved, because their modules may import torch. The
    arguments are those of `assemble`.
    """
    problems = list(words.problems)
    _apply_values(node, words, catalogue, problems)
    tree = cast("dict[str, Any]", resolve(node, "", problems))
    _read_sections(tree, chosen, catalogue, problems)
    return list(dict.fromkeys(problems))


def _target_paths(node: DictConfig) -> dict[str, str]:
    """Return the ``_target_`` of each group where it is a plain string."""
    paths = {}
    for group in TARGET_GROUPS:
        part = node._get_node(group) if group in node else None
        target = part._get_node("_target_") if isinstance(part, DictConfig) and "_target_" in part else None
        path = target._value() if target is not None else None
        if isinstance(path, str):
            paths[group] = path
    return paths


def resolve(node: Any, key: str, problems: list[Problem]) -> Any:
    """Convert an OmegaConf tree to plain dicts and lists, resolving every interpolation (``${...}``).

    Any other value is returned unchanged. ``key`` is the dotted key of the tree, for messages; empty for the whole.
    Each failure is added to ``problems``, and its value becomes `UNRESOLVED`.
    """
    if isinstance(node, DictConfig):
        return {
            str(name): _resolve_entry(node, name, f"{key}.{name!s}" if key else str(name), problems) for name in node
        }
    if isinstance(node, ListConfig):
        return [_resolve_entry(node, index, f"{key}[{index}]", problems) for index in range(len(node))]
    return node


def _resolve_entry(node: Any, name: Any, key: str, problems: list[Problem]) -> Any:
    try:
        if OmegaConf.is_missing(node, name):
            problems.append(Problem(f"{key} is required", f"write {key}=VALUE"))
            return UNRESOLVED
        return resolve(node[name], key, problems)
    except (OmegaConfBaseException, RecursionError) as error:
        problems.append(Problem(f"{key}: {first_line(error)}"))
        return UNRESOLVED


def _explained(problem: Problem, chosen: dict[str, str], catalogue: Catalogue) -> Problem:
    """Return the problem, using the YAML comment of its key as the hint if it has none."""
    if problem.hint or not (about := catalogue.about(problem.key, chosen)):
        return problem
    return dataclasses.replace(problem, hint=f"{problem.key}: {about}")


def _keys_of_given(given: Mapping[str, Given]) -> Iterator[str]:
    """Yield the keys that what a program has given takes: no YAML file lists them."""
    for group, part in given.items():
        yield from (f"{group}.{name}" for name in parameters(part.call)[0])


def _apply_values(
    node: DictConfig,
    words: ParsedOverrides,
    catalogue: Catalogue,
    problems: list[Problem],
    further: tuple[str, ...] = (),
) -> None:
    tree = cast("dict[str, Any]", OmegaConf.to_container(node, resolve=False))
    wrong_groups = bool(problems)
    for word in sorted(words.values, key=lambda word: not word.key_or_group.endswith("._target_")):
        key = word.key_or_group
        if problem := check_key(word, tree, catalogue, (*_GENERAL, *_FIELDS, *_BESIDE, *further)):
            # With a wrong option, other files were merged than the user meant, so the key may belong to the right one.
            if not (wrong_groups and catalogue.options_with(key)):
                problems.append(problem)
            continue
        try:
            if word.is_delete():
                parent, _, name = key.rpartition(".")
                del OmegaConf.select(node, parent)[name]
            else:
                value = word.value()
                merge = isinstance(value, dict) and OmegaConf.is_dict(OmegaConf.select(node, key))
                OmegaConf.update(node, key, value, merge=merge, force_add=True)
                if key.endswith("._target_"):  # decides which other keys there are
                    tree = cast("dict[str, Any]", OmegaConf.to_container(node, resolve=False))
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            problems.append(Problem(f"{word.input_line}: {first_line(error)}"))


def _read_sections(
    tree: dict[str, Any], chosen: dict[str, str], catalogue: Catalogue, problems: list[Problem]
) -> tuple[Any, dict[str, Any]]:
    """Return the checked top-level keys and the checked sections, None for each invalid one; report unknown keys."""
    for name in tree:
        if name not in (*_GENERAL, *SECTIONS, *TARGET_GROUPS, "learners"):
            hint = "mptrain list shows all keys"
            if name in catalogue.groups:
                hint = f"add '# @package _global_' as the first line of its file in {name}/"
            if name == "_target_":
                hint = HEADER.format(group=_misplaced(chosen, catalogue))
            problems.append(Problem(f"unknown key '{name}' in the chosen files", hint))
    general = check_section("", {name: tree[name] for name in _GENERAL if name in tree}, GeneralOptions, problems)
    return general, {name: check_section(name, tree.get(name, {}), kind, problems) for name, kind in SECTIONS.items()}


def _misplaced(chosen: dict[str, str], catalogue: Catalogue) -> str:
    """Return the group whose chosen file has its ``_target_`` at the top level of the configuration."""
    for group, name in chosen.items():
        option = catalogue.groups.get(group, {}).get(name)
        if option and option.is_global and "_target_" in option.keys:
            return group
    return "GROUP"


#: Groups that the top-level file may omit, and the targets used then.
_LEFT_OUT = {"logger": "mptrain.logger.NoLogger", "diagnostics": "mptrain.engine.histograms.NoProbe"}


def _read_targets(
    tree: dict[str, Any], extensions: Any, problems: list[Problem], given: Mapping[str, Given]
) -> dict[str, Target]:
    allow = extensions.allow if extensions else ()
    targets = {}
    for group in TARGET_GROUPS:
        node = tree.get(group)
        if node is None and group in _LEFT_OUT:
            node = {"_target_": _LEFT_OUT[group]}
        if node is UNRESOLVED:
            continue
        if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
            hint = f"choose one with {group}=OPTION; mptrain list {group} shows them"
            if isinstance(node, dict) and node:
                hint = HEADER.format(group=group)
            problems.append(Problem(f"{group} has no _target_", hint))
            continue
        arguments = {key: value for key, value in node.items() if key != "_target_"}
        call = given[group].call if group in given else None
        targets[group] = Target(node["_target_"], arguments, (*PACKAGES[group], *allow), given=call)
    return targets


def _take_facts(targets: dict[str, Target], problems: list[Problem]) -> dict[str, str] | None:
    """Move ``model.facts`` from the model's arguments into its target: the fact to pass for each further keyword."""
    value = _take(targets, "facts")
    if value is None:
        return None
    if isinstance(value, list):
        value = {str(name): name for name in value}
    if not isinstance(value, dict) or not all(isinstance(name, str) for pair in value.items() for name in pair):
        problems.append(
            Problem(
                f"model.facts={show(value)}: must be a list of facts, or a mapping from keywords to facts",
                "write model.facts=[num_classes], or model.facts={n_classes: num_classes}",
            )
        )
        return None
    targets["model"] = dataclasses.replace(targets["model"], facts=value)
    return value


def _take_weights(targets: dict[str, Target], problems: list[Problem]) -> Path | None:
    """Remove ``model.weights`` from the model's arguments and return it, unless the target has such a parameter."""
    value = _take(targets, "weights")
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        problems.append(Problem(f"model.weights={show(value)}: must be the path of a weights file or of a run"))
        return None
    return Path(value)


def _take_freeze(targets: dict[str, Target], problems: list[Problem]) -> tuple[str, ...]:
    """Remove ``model.freeze`` from the model's arguments and return it, unless the target has such a parameter."""
    value = check_field("model.freeze", _take(targets, "freeze") or [], tuple[str, ...], problems)
    return () if value is UNRESOLVED else tuple(value)


def _take(targets: dict[str, Target], key: str) -> Any:
    model = targets.get("model")
    if model is None or key not in model.arguments:
        return None
    try:
        if key in parameters(model.resolve())[0]:
            return None
    except ConfigError:  # reported when the target is checked
        return None
    arguments = dict(model.arguments)
    value = arguments.pop(key)
    targets["model"] = dataclasses.replace(model, arguments=arguments)
    return value


def _check_targets(
    targets: dict[str, Target], typed: Mapping[str, set[str]], catalogue: Catalogue, problems: list[Problem]
) -> dict[str, Target]:
    """Check all targets; ``typed`` has the typed keys for each group whose target an override has replaced."""
    checked = {}
    data = targets.get("dataset")
    # A data set that is not mptrain's may have facts that only `build` can find out.
    own_data = data is not None and not is_allowed(data.path, PACKAGES["dataset"])
    for group, target in targets.items():
        try:
            checked[group] = check_target(target, group, other_facts=own_data and group in ("model", "task"))
        except ConfigError as error:
            keys = {problem: ".".join(problem.key.split(".")[:2]) for problem in error.problems if problem.key}
            left = {problem: key for problem, key in keys.items() if group in typed and key not in typed[group]}
            problems += [problem for problem in error.problems if problem not in left]
            if left:
                stale = dict.fromkeys(left.values())
                what = f"{group}._target_={target.path} does not take {', '.join(stale)} of the chosen {group}"
                hint = f"{how_to_choose(target.path, group, catalogue)}; or add {' '.join(f'~{key}' for key in stale)}"
                problems.append(Problem(what, hint))
    return checked


def _touches_targets(words: ParsedOverrides) -> bool:
    return any(word.key_or_group.split(".")[0] in (*TARGET_GROUPS, "extensions") for word in words.values)


#: Text that takes the place of a secret (`mptrain.system.masking`).
_SECRET = re.compile(r"\$\{oc\.env:[^{}]*\}")


def _whole_tree(
    general: Any,
    targets: dict[str, Target],
    sections: dict[str, Any],
    model_options: dict[str, Any],
    chosen: dict[str, str],
) -> dict[str, Any]:
    nodes = {
        group: {"_target_": target.path, **cast("dict[str, Any]", _plain({**target.arguments, **target.options}))}
        for group, target in targets.items()
    }
    nodes["model"].update(model_options)
    tree = {**_plain(general), **nodes, **{name: _plain(value) for name, value in sections.items()}}
    return cast("dict[str, Any]", masked({**tree, "chosen": dict(chosen)}))


def _interpolations(value: Any, key: str = "") -> Iterator[Problem]:
    """Yield a problem for each text that config.yaml would have as an interpolation, but for those of secrets."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _interpolations(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _interpolations(item, f"{key}[{index}]")
    elif isinstance(value, str) and "${" in _SECRET.sub("", value):
        what = f"{key}={show(value)}: ${{ begins an interpolation where the run is resumed"
        yield Problem(what, "choose a value without it")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields_of(type(value))}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value
