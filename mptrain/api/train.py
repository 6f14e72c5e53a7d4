"""`mptrain.train`: a training run from Python, as the command line starts it, and the resumption of one."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from mptrain.api.given import OWN_LOSS, given_parts
from mptrain.api.run import PARTS, Run, in_python, open_run, require_words, run_in_errors
from mptrain.api.training import function_of_program, trained
from mptrain.cli.messages import warn
from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.compose import compose
from mptrain.config.synonyms import guess_word, near_options, optimizer_named
from mptrain.config.value_checks import as_word
from mptrain.config.value_checks import show as shown
from mptrain.engine.options import OnStep, StopFunction
from mptrain.run.resume import launch
from mptrain.runlog.record_writer import Sink
from mptrain.system.errors import ConfigError, UsageError, did_you_mean
from mptrain.workloads.base.map_style import OF_LOADER
from mptrain.workloads.tables.datasets.table import PATH as TABLE


@in_python
def train(
    *overrides: str,
    model: Any = None,
    data: Any = None,
    target: str | Sequence[str] | None = None,
    task: Any = None,
    stop: StopFunction | None = None,
    on_step: OnStep | None = None,
    callbacks: Sequence[Sink] = (),
    update_model: bool = True,
    show: bool = True,
    config_dirs: str | Path | Sequence[str | Path] = (),
    config_name: str = "train",
    **words: Any,
) -> Run:
    """Train a run and return it, as ``mptrain OVERRIDES`` does; an error is raised, and the process never exits.

    Generators of random numbers, torch's settings, signal handlers and the current folder are as before afterwards.
    Ctrl-C, or a notebook's stop button, ends the run after its step and saves it: `Preempted` is raised, and the same
    call with ``run.resume=auto`` and its ``run.name`` goes on.

    Args:
        overrides: ``KEY=VALUE`` or ``GROUP=OPTION``, such as ``model=resnet18`` and ``precision=amp_dynamic``.
        model: A `torch.nn.Module`, which has the trained weights afterwards; or a class, or a function, that makes one:
            it gets its keys (``model.width=64``) and facts of the data, such as ``num_classes``, by name. None for the
            configured ``model``.
        data: One part to train on, or a tuple or mapping of ``train``, ``val`` and ``test``. A part is a pair (inputs,
            targets) of tensors or arrays, a map-style dataset of torch, whose samples are such pairs, or a
            `pandas.DataFrame`. None for the configured ``dataset``.
        target: Name of the column of a `pandas.DataFrame` that is to be predicted, or names of several.
        task: A class or function that makes a task (`mptrain.workloads.base.task.Task`). None for the configured one.
        stop: Function that gets the metrics of each validation by name, with ``epoch`` and ``step``. Training ends
            if it returns True, or the reason as text.
        on_step: Function that gets a view of each attempted step (`mptrain.engine.options.StepView`), before the next
            batch and on every rank: ``step``, ``epoch``, ``model``, ``batch``, ``optimizers``; ``view.stop(why)`` ends
            training after it. It looks: modes, buffers and generators of random numbers, which are seeded by the step,
            are as before afterwards, and a changed parameter is an error. Its time counts as training.
        callbacks: Sinks of the run's records (`mptrain.runlog.record_writer.Sink`): ``take(record)``, ``close()``.
        update_model: Give a `torch.nn.Module` the trained weights; False leaves it as it was.
        show: Print the run's progress.
        config_dirs: Folder, or folders, with groups and options of your own.
        config_name: Name of another top-level configuration.
        words: Refused: keys and options are words, as on the command line.

    Raises:
        MptrainError: The configuration is invalid, or the run failed; its directory has the reason. A module that is
            trained then has the weights of the last checkpoint.
    """
    _require_words(overrides, words)
    parts = {"model": model, "dataset": data, "task": task}
    require_words(overrides, [group for group, part in parts.items() if part is not None])
    folders = [config_dirs] if isinstance(config_dirs, str | Path) else config_dirs
    given = given_parts(model, data, task)
    if "model" in given and given["model"].module is not None:
        for word in overrides:
            if word.lstrip("+~").startswith("model.") and word.lstrip("+~").partition("=")[0] not in _OF_ANY_MODEL:
                raise UsageError(f"{word} has no effect: model is a module, which is made", "give its class instead")
    if "dataset" in given:
        overrides = (f"dataset={'table' if given['dataset'].path == TABLE else 'from_python'}", *overrides)
    if target is not None:
        overrides = (*overrides, f"dataset.target={json.dumps(target, ensure_ascii=False)}")
    config = compose(overrides, config_dirs=[str(folder) for folder in folders], config_name=config_name, given=given)
    if (config.distributed.procs or 1) > 1:
        raise ConfigError(
            f"distributed.procs={config.distributed.procs}: from Python a run has one process",
            "start it with the command line, or with torchrun",
        )
    config = replace(config, stop=function_of_program("stop", stop), on_step=function_of_program("on_step", on_step))
    if show:
        warn(config.warnings)
    if not update_model and "model" in given:
        given["model"] = replace(given["model"], module=None)
    with run_in_errors(given):
        root = trained(functools.partial(launch, config), given, callbacks, update=update_model, show=show)
    return open_run(root).with_parts(given)


#: Keys of a model that are no arguments of its class.
_OF_ANY_MODEL = ("model.weights", "model.freeze")


def _arguments(name: str, value: Any, catalogue: Catalogue) -> str:
    """Return the arguments that a keyword argument means: words, or another keyword."""
    word = guess_word(name, text := as_word(value), catalogue) or f"KEY={text}"
    group, _, option = word.partition("=")
    if text != shown(value) and (part := PARTS.get(group.partition(".")[0])):  # an object
        return f"{part}=..."
    if group == "KEY" and (near := did_you_mean(name, inspect.signature(train).parameters)):
        return f"{near}=..."
    if (options := [*catalogue.groups.get(group, ())]) and option not in options:
        named = [f"{group}={near}" for near in near_options(group, option, options)]
        word = next(iter(named), optimizer_named(option) if group == "optimizer" else "") or word
    word = "run.resume=auto" if word.startswith("mptrain resume") else word
    return ", ".join(map(json.dumps, re.split(r"\s+(?=[\w.]+=)", word)))


def _require_words(overrides: Sequence[Any], words: Mapping[str, Any]) -> None:
    require_words(overrides)
    if words:
        catalogue = Catalogue([configs_folder()])
        what = f"mptrain.train has no argument {', '.join(words)}"
        if {*words} & {"loss", "loss_fn", "loss_function", "criterion"}:
            raise UsageError(what, OWN_LOSS)
        if any(isinstance(value, DataLoader) for value in words.values()):
            raise UsageError(what, OF_LOADER)
        meant = [_arguments(name, value, catalogue) for name, value in words.items()]
        raise UsageError(what, f"keys and options are words: mptrain.train({', '.join(meant)})")
