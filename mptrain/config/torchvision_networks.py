"""Rules of torchvision's networks named with ``_target_`` that their signatures do not tell: classes, weights, hints.

`mptrain.config.targets` applies them to paths in torchvision alone. They belong to no workload: networks of several
tasks share them, and arguments are checked before torch, which workloads import, is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mptrain.config.allowed_targets import is_allowed
from mptrain.config.synonyms import torchvision_names
from mptrain.config.value_checks import show
from mptrain.system.errors import ConfigError

#: Arguments for weights to download. They are set to None where the configuration says nothing, because some builders,
#: such as those of detectors, download by default.
PRETRAINED = ("weights", "weights_backbone")

#: Keyword to the fact of the data set that is passed as ``**kwargs``: builders hand them on to a class with
#: ``num_classes``, so their own signatures do not have it.
PASSED_ON = {"num_classes": "num_classes"}


def is_of_torchvision(path: str) -> bool:
    """Return whether a dotted path is one in torchvision."""
    return is_allowed(path, ("torchvision",))


def may_be_name_of_weights(path: str, argument: str, value: Any) -> bool:
    """Return whether a value names weights: their annotation is an enum, but names of its members are accepted too."""
    return argument in PRETRAINED and isinstance(value, str) and is_of_torchvision(path)


@contextlib.contextmanager
def without_pretrained(
    path: str, arguments: Mapping[str, Any], accepted: Collection[str], fetch: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield arguments that give a torchvision network random weights, and block downloads that were not typed.

    Args:
        path: Dotted path of the class or function; of other packages nothing is yielded or blocked.
        arguments: Its arguments in the configuration.
        accepted: Names of the arguments that it has.
        fetch: Names of the arguments that are allowed to cause a download.

    Raises:
        ConfigError: In the body, if it loads pretrained weights in any way.
    """
    if not is_of_torchvision(path):
        yield {}
        return
    from torchvision.models import WeightsEnum

    asked = {name: value for name, value in arguments.items() if "weights" in name or "pretrained" in name}
    asked = {name: value for name, value in asked.items() if value not in (None, False)}
    fresh = {name: None for name in PRETRAINED if name in accepted and name not in arguments}
    if asked and set(asked) <= set(fetch):
        yield fresh
        return

    def refuse(weights: WeightsEnum, *_: Any, **__: Any) -> None:
        words = " ".join(f"model.{name}={show(value)}" for name, value in asked.items())
        raise ConfigError(
            f"{path} would download pretrained weights, {weights}, which only a typed override may allow",
            f"set {words or '+model.weights_backbone=null'}",
        )

    # Arguments do not tell all: a builder may have other names and defaults for weights, but all load by this method.
    kept = WeightsEnum.get_state_dict
    WeightsEnum.get_state_dict = refuse
    try:
        yield fresh
    finally:
        WeightsEnum.get_state_dict = kept


def hint_by_name(path: str) -> str:
    """Return the hint for a torchvision classifier, which ``model=torchvision`` covers; empty for any other path."""
    package, _, name = path.rpartition(".")
    known = package.startswith("torchvision.models") and torchvision_names(name) == [name]
    return f"set model=torchvision model.name={name} instead of the other model overrides" if known else ""
