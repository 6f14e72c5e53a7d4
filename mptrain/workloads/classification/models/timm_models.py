"""timm's image classifiers by name, with random or pretrained weights. timm is imported only when one is built."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.errors import ConfigError
from mptrain.extras import load_extra
from mptrain.pretrained import ATTRIBUTE, PretrainedWeights, hub_file, url_file
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

    Args:
        name: Name from ``timm.list_models()``, optionally with the tag of its weights: ``resnet18.a1_in1k``.
        num_classes: Length of the output.
        in_channels: Channels of the input.
        image_size: Side of the input in pixels.
        arguments: Further keyword arguments of ``timm.create_model``, such as ``drop_path_rate``.
        pretrained: Whether a new run starts from timm's weights. timm fits them to channels and image size. A head for
            other classes keeps its random weights.
        download: Whether missing weights may be downloaded.

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
        written = ", ".join(f"{key}: {value}" for key, value in (arguments or {}).items())
        raise ConfigError(
            f"{name} cannot be built with model.arguments={{{written}}} for images of {image_size} pixels: {error}",
            f"timm's size is {about.input_size[-1] if about else 224}: set dataset.image_size to it or to a multiple",
        ) from error
    require_size(model, name, image_size, in_channels)
    if pretrained:
        load = functools.partial(_pretrained, make, about, name, download)
        statistics = None if about is None else (tuple(about.mean), tuple(about.std))
        setattr(model, ATTRIBUTE, PretrainedWeights(f"timm/{name}", load, statistics))
    return model


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
