"""torchvision's image classifiers by name, with random or pretrained weights."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from mptrain.system.errors import ConfigError
from mptrain.system.pretrained import ATTRIBUTE, PretrainedWeights, url_file


def torchvision_classifier(
    *,
    name: str,
    num_classes: int,
    image_size: int,
    in_channels: int = 3,
    arguments: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    download: bool = True,
) -> nn.Module:
    """Build a torchvision image classifier for any number of classes, with random or pretrained weights.

    GoogLeNet and Inception v3 have their auxiliary heads: in training mode they return a named tuple of logits, in
    evaluation mode one tensor. torchvision is imported only here, because the import takes a second. ``name`` is one of
    ``torchvision.models.list_models()``, and ``arguments`` are further keywords of its function, such as ``dropout``.
    If ``pretrained``, a new run starts from the weights that torchvision calls ``DEFAULT``; a head for other classes
    keeps its random weights.

    Raises:
        ConfigError: There is no such classifier, or it does not support an argument or the input, which has 3 channels.
    """
    from torchvision import models

    known = classifier_names()
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=5, cutoff=0))
        raise ConfigError(f"model.name={name}: torchvision has no such classifier", f"similar names are {near}")
    if in_channels != 3:
        raise ConfigError(
            f"dataset.channels={in_channels}, but {name} takes images of 3 channels", "set dataset.channels=3"
        )
    chosen = {**_own_choices(name, image_size), **(arguments or {})}
    builder = models.get_model_builder(name)
    try:
        inspect.signature(builder).bind(weights=None, num_classes=num_classes, **chosen)
        model: nn.Module = builder(weights=None, num_classes=num_classes, **chosen)
    except (TypeError, ValueError) as error:
        written = ", ".join(f"{key}: {value}" for key, value in (arguments or {}).items())
        raise ConfigError(f"model.arguments={{{written}}}: {name} rejects them: {error}") from error
    require_size(model, name, image_size, in_channels)
    if pretrained:
        weights = models.get_model_weights(name).DEFAULT
        load = functools.partial(_pretrained, weights.url, download)
        images = weights.transforms()
        statistics = (tuple(images.mean), tuple(images.std))
        setattr(model, ATTRIBUTE, PretrainedWeights(f"torchvision's {weights}", load, statistics))
    return model


def _pretrained(url: str, download: bool) -> dict[str, Tensor]:
    return cast("dict[str, Tensor]", torch.load(url_file(url, download=download), weights_only=True))


def classifier_names() -> list[str]:
    """Return the names of torchvision's image classifiers: no detection, segmentation, video or quantized models."""
    from torchvision import models

    names: list[str] = models.list_models(module=models)
    return names


def _own_choices(name: str, image_size: int) -> dict[str, Any]:
    if name.startswith("vit_"):
        return {"image_size": image_size}
    # torchvision warns if init_weights is not set, because its default may change.
    chosen: dict[str, Any] = {"aux_logits": True, "init_weights": True}
    if name == "googlenet":
        return chosen
    if name == "inception_v3":
        from torchvision.models import inception as blocks

        from mptrain.workloads.classification.models.inception import FittingAux

        published = (blocks.BasicConv2d, blocks.InceptionA, blocks.InceptionB, blocks.InceptionC)
        return {**chosen, "inception_blocks": [*published, blocks.InceptionD, blocks.InceptionE, FittingAux]}
    return {}


def require_size(model: nn.Module, name: str, image_size: int, in_channels: int) -> None:
    """Raise `ConfigError` if pools or windows of a network need larger images than these; runs on the meta device."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors.items()}
    images = torch.empty(2, in_channels, image_size, image_size, device="meta")
    try:
        with torch.no_grad():
            torch.func.functional_call(model, shapes, (images,))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"dataset.image_size={image_size}: {name} cannot take images of that size: {error}",
            "use a larger dataset.image_size, or null for the data set's default",
        ) from error
