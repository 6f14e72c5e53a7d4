"""torchvision's image classifiers by name, always without pretrained weights."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mptrain.errors import ConfigError


def torchvision_classifier(
    *, name: str, num_classes: int, image_size: int, in_channels: int = 3, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build a torchvision image classifier without pretrained weights, for any number of classes.

    GoogLeNet and Inception v3 have their auxiliary heads: in training mode they return a named tuple of logits, in
    evaluation mode one tensor. torchvision is imported only here, because the import takes a second.

    Args:
        name: Name from ``torchvision.models.list_models()``.
        num_classes: Number of classes, which is the length of the output.
        image_size: Side of the input in pixels.
        in_channels: Channels of the input; the published networks take 3.
        arguments: Further keyword arguments of torchvision's function, such as ``dropout``.

    Returns:
        A network that maps images ``[N, 3, image_size, image_size]`` to logits ``[N, num_classes]``.

    Raises:
        ConfigError: There is no such classifier, or it does not support an argument or the input.
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
    _try_size(model, name, image_size)
    return model


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


def _try_size(model: nn.Module, name: str, image_size: int) -> None:
    """Run the network on the meta device to check the image size, because some pools need a minimum size."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors.items()}
    images = torch.empty(2, 3, image_size, image_size, device="meta")
    try:
        with torch.no_grad():
            torch.func.functional_call(model, shapes, (images,))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"dataset.image_size={image_size}: {name} cannot take images of that size: {error}",
            "use a larger dataset.image_size, or null for the data set's default",
        ) from error
