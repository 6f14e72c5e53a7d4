"""timm's image classifiers by name, with random or pretrained weights. timm is imported only when one is built."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.system.errors import ConfigError, did_you_mean
from mptrain.system.machine import load_extra
from mptrain.system.pretrained import ATTRIBUTE, FIT, PretrainedWeights, hub_file, url_file
from mptrain.workloads.classification.models.published import require_size

#: Keywords of ``timm.create_model`` that mptrain sets or refuses, with the reason.
_NOT_ARGUMENTS = {
    "num_classes": "the data set sets it",
    "in_chans": "set dataset.channels",
    "img_size": "set dataset.image_size",
    "pretrained": "set model.pretrained=true",
    "checkpoint_path": "set model.weights=FILE",
    "pretrained_cfg": "choose weights by their tag: model.name=NAME.TAG",
    "pretrained_cfg_overlay": "choose weights by their tag: model.name=NAME.TAG",
    "cache_dir": "set the environment variable HF_HUB_CACHE",
}


def timm_classifier(
    *,
    name: str,
    num_classes: int,
    in_channels: int,
    image_size: int,
    arguments: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    download: bool = True,
) -> nn.Module:
    """Build an image classifier of timm for the classes, channels and image size of a data set.

    Architectures of a fixed input size, such as ViT, are built for ``image_size``; the others take images of any size.
    ``name`` is one of ``timm.list_models()``, optionally with the tag of its weights: ``resnet18.a1_in1k``.
    ``arguments`` are further keywords of ``timm.create_model``. If ``pretrained``, a new run starts from timm's
    weights, which timm fits to channels and image size; a head for other classes keeps its random weights.

    Raises:
        EnvironmentRefused: timm is not installed.
        ConfigError: There is no such classifier, or it does not support an argument or the image size.
    """
    timm = load_extra("timm", "timm", "model=timm")
    architecture, _, tag = name.partition(".")
    known = timm.list_models()
    if architecture not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=5, cutoff=0))
        raise ConfigError(f"model.name={name}: timm has no such classifier", f"similar names are {near}")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(architecture)]
    if tag and tag not in tags:
        raise ConfigError(f"model.name={name}: timm has no weights with this tag", f"its tags are {', '.join(tags)}")
    if refused := [key for key in arguments or {} if key in _NOT_ARGUMENTS]:
        raise ConfigError(f"model.arguments.{refused[0]} is not for you to set", _NOT_ARGUMENTS[refused[0]])
    about = timm.get_pretrained_cfg(name)
    size = {"img_size": image_size} if about is not None and about.fixed_input_size else {}
    make = functools.partial(timm.create_model, name, in_chans=in_channels, **size, **(arguments or {}))
    try:
        model: nn.Module = make(num_classes=num_classes)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        _require_known(timm.model_entrypoint(name).__module__, name, arguments or {}, error)
        written = ", ".join(f"{key}: {value}" for key, value in (arguments or {}).items())
        raise ConfigError(
            f"{name} cannot be built with model.arguments={{{written}}} for images of {image_size} pixels: {error}",
            f"timm's size is {about.input_size[-1] if about else 224}: set dataset.image_size to it or to a multiple",
        ) from error
    require_size(model, name, image_size, in_channels)
    setattr(model, FIT, _fitted)
    if pretrained:
        load = functools.partial(_pretrained, make, about, name, download)
        statistics = None if about is None else (tuple(about.mean), tuple(about.std))
        setattr(model, ATTRIBUTE, PretrainedWeights(f"timm/{name}", load, statistics))
    return model


def _require_known(module: str, name: str, arguments: Mapping[str, Any], error: Exception) -> None:
    """Raise an error for an argument that a class of timm rejected as unknown; ``module`` has the class."""
    unknown = [key for key in arguments if "unexpected keyword" in str(error) and f"'{key}'" in str(error)]
    if not unknown:
        return
    kind = getattr(sys.modules[module], str(error).partition(".")[0], None)  # "ResNet.__init__() got an unexpected …"
    guess = did_you_mean(unknown[0], inspect.signature(kind).parameters if callable(kind) else ())
    raise ConfigError(
        f"unknown key 'model.arguments.{unknown[0]}': {name} takes no such argument",
        f"did you mean model.arguments.{guess}?" if guess else f"the classes in {module} have its arguments",
    ) from error


def _fitted(model: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return weights, those that do not fit converted by timm if it has a function for it, such as for positions."""
    own = model.state_dict()
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    unfit = [name for name, value in own.items() if name not in weights or weights[name].shape != value.shape]
    if convert is None or not unfit:
        return weights
    try:
        converted = convert(dict(weights), model)
    except Exception:  # weights of another network; those that fit are loaded
        return weights
    return {**weights, **{name: converted[name] for name in unfit if name in converted}}


def _pretrained(make: Any, about: Any, name: str, download: bool) -> dict[str, Tensor]:
    """Return timm's weights, fitted to channels and image size, with the head that they were trained with."""
    if about is None or not (about.hf_hub_id or about.url):
        raise ConfigError(f"model.pretrained=true: timm has no weights for {name}", "set model.pretrained=false")
    if about.hf_hub_id:
        listed = about.hf_hub_filename or "model.safetensors"
        file = hub_file(about.hf_hub_id, listed.replace("pytorch_model.bin", "model.safetensors"), download=download)
    else:
        file = url_file(about.url, download=download)
    with torch.random.fork_rng(devices=()):
        overlay = {"file": str(file), "custom_load": str(file).endswith(".npz")}
        donor: nn.Module = make(pretrained=True, pretrained_cfg_overlay=overlay)
    return donor.state_dict()
