"""Import of the classes and functions that YAML names with ``_target_``, from allowed packages alone.

An untrusted YAML file therefore cannot run commands or write files, unless the user has allowed more packages. Only
allowed paths are imported.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from mptrain.system.errors import (
    ConfigError,
    either,
    instance,
    near_names,
    out_of_memory,
    user_packages,
)

#: Trackers, by their names in YAML and where they are defined. Other names in that package read pickles.
_TRACKERS = (
    *("NoLogger", "TensorBoard", "MLflow", "WandB"),
    *("base.NoLogger", "tensorboard.TensorBoard", "mlflow.MLflow", "wandb.WandB"),
)


#: Maps group to the packages whose classes and functions every YAML file may name. The rest of mptrain is excluded,
#: because some of its functions take command lines or write files.
PACKAGES: dict[str, tuple[str, ...]] = {
    "model": ("mptrain.workloads.*.models.*", "torchvision.models.*"),
    "task": ("mptrain.workloads.*.task.*",),
    "dataset": ("mptrain.workloads.*.datasets.*",),
    "optimizer": ("mptrain.optimizer.*", "torch.optim.*", "timm.optim.*"),
    "schedule": ("mptrain.schedule.*", "torch.optim.lr_scheduler.*", "timm.scheduler.*"),
    "scaler": ("mptrain.scaler.*",),
    "logger": tuple(f"mptrain.logger.{name}" for name in _TRACKERS),
    "diagnostics": ("mptrain.engine.histograms.*",),
}


#: Names in configurations that were saved before their definitions moved, and the names of today.
MOVED = {
    "mptrain.probe.histograms.Histograms": "mptrain.engine.histograms.Histograms",
    "mptrain.probe.probe.NoProbe": "mptrain.engine.histograms.NoProbe",
}


#: First names of these packages.
NOT_OF_USERS = {pattern.partition(".")[0] for patterns in PACKAGES.values() for pattern in patterns}


def resolve(path: str, allow: Sequence[str]) -> Callable[..., Any]:
    """Import the class or function with a dotted path, if it belongs to an allowed package.

    It must be a direct attribute of its module, must be *defined* in an allowed package, and must not have a leading
    underscore. So no attribute of an allowed module gives access to anything outside the allowed packages.

    Args:
        path: ``package.module.name``.
        allow: Patterns of packages; ``mypkg`` and ``mypkg.*`` mean the same.

    Raises:
        ConfigError: The target is not allowed or cannot be imported; the hint says how to allow it.
    """
    path = MOVED.get(path, path)
    if path.startswith("__main__.") or "<" in path:  # no file of a package has it
        raise ConfigError(
            f"{path} is in a Python program, which alone has it",
            "give it there: mptrain.open_run(RUN, model=...), and task=... and data=... if they were given too",
        )
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"_target_ '{path}' is not the dotted path of a class or function", "set it to package.module.Name"
        )
    if not is_allowed(path, allow):
        raise ConfigError(
            f"_target_ '{path}' is not in an allowed package ({', '.join(allow)})", _how_to_allow(path, allow)
        )
    if any(part.startswith("_") for part in path.split(".")):
        raise ConfigError(f"_target_ '{path}' is private", "name a public class or function")
    user_packages.update(packages_of_users(allow))
    module = _import(module_name, path)
    if not hasattr(module, name):
        words = [word for word in dir(module) if not word.startswith("_") and callable(getattr(module, word))]
        guesses = [f"{module_name}.{guess}" for guess in near_names(name, words)]
        raise ConfigError(
            f"_target_ '{path}': {module_name} was imported, but it has no '{name}'",
            f"did you mean {either(guesses)}?" if guesses else "",
        )
    target = getattr(module, name)
    if not (inspect.isclass(target) or inspect.isfunction(target)):
        raise ConfigError(f"_target_ '{path}' is {instance(target)}, not a class or function")
    home = f"{target.__module__}.{target.__qualname__}"
    if not is_allowed(home, allow):
        raise ConfigError(
            f"_target_ '{path}' is defined as {home}, which is not in an allowed package ({', '.join(allow)})",
            _how_to_allow(home, allow),
        )
    return cast("Callable[..., Any]", target)


def packages_of_users(allow: Sequence[str]) -> set[str]:
    """Return the first names of the packages that patterns allow beyond those of `PACKAGES`."""
    return {pattern.partition(".")[0] for pattern in allow} - NOT_OF_USERS


def is_allowed(path: str, allow: Sequence[str]) -> bool:
    """Return whether a dotted path of Python code is inside one of the allowed packages.

    Args:
        path: ``package.module.name``, or a module.
        allow: Patterns of packages; ``*`` matches one name, and a final ``.*`` has no effect.
    """
    names = path.split(".")
    packages = [pattern.removesuffix(".*").split(".") for pattern in allow]
    return any(
        len(names) >= len(package)
        and names[0] == package[0]
        and all(part in ("*", name) for part, name in zip(package, names, strict=False))
        for package in packages
    )


def _how_to_allow(path: str, allow: Sequence[str]) -> str:
    package = path.split(".")[0]
    if package == "mptrain":  # code outside the packages of this group is not meant to be called from YAML
        return f"name a class or function of {' or '.join(allow)}"
    if package in sys.stdlib_module_names:  # suspicious: no part of a run comes from the standard library
        return f"{package} is in Python's standard library, which has no parts of a run: check who wrote this file"
    return f"if you trust it, add 'extensions.allow=[{package}.*]'"


def _import(module_name: str, path: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] == "timm":
            hint = "pip install 'mptrain[timm]'"
        elif module_name == missing or module_name.startswith(missing + "."):
            hint = "check the spelling; a package that is not installed must be on PYTHONPATH"
        else:
            hint = f"install {missing}, which {module_name} needs"
        raise ConfigError(f"_target_ '{path}': importing {module_name} failed: {error}", hint) from error
    except Exception as error:  # importing runs code of third parties, which may raise anything
        if refused := out_of_memory(error, f"importing {module_name}"):
            raise refused from error
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"_target_ '{path}': importing {module_name} failed: {what}") from error
