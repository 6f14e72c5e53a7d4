"""Features of pictures from a trained classifier, to judge generated pictures. The classifier computes in FP32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from mptrain.system.errors import ConfigError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.preparation import Preparation, grey


class ClassifierFeatures:
    """Feature extractor: the inputs of a trained classifier's last linear layer (Heusel et al. 2017), and its logits.

    Args:
        make: Factory of the trained classifier on a device, called once, for the first pictures.
        preparation: Preparation of the inputs in the classifier's training; None if it takes pictures from -1 to 1.
        labelled: Whether the classes of the classifier are those of the data, so that its accuracy can be measured.
    """

    def __init__(
        self, make: Callable[[torch.device], nn.Module], preparation: Preparation | None, *, labelled: bool
    ) -> None:
        self.labelled = labelled
        self._make = make
        self._preparation = preparation
        self._classifier: nn.Module | None = None

    def extract(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features ``[N, D]`` and logits ``[N, classes]`` of pictures, float32 on the device, without gradients.

        Pictures are floats ``[N, C, H, W]`` from -1 to 1. A classifier without linear layer raises `ConfigError`.
        """
        seen: list[Tensor] = []
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            if self._classifier is None:
                self._classifier = self._make(images.device).float().eval().requires_grad_(False)
            classifier = self._classifier
            layers = [module for module in classifier.modules() if isinstance(module, nn.Linear)]
            hooks = [layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in layers]
            try:
                logits: Tensor = classifier(self._prepared(images.float()))
            finally:
                for hook in hooks:
                    hook.remove()
        if not seen:
            raise ConfigError(
                f"task.classifier: {type(classifier).__name__} has no linear layer to take features from",
                "name a run of another classifier",
            )
        return seen[-1].flatten(1), logits

    def _prepared(self, images: Tensor) -> Tensor:
        if self._preparation is None:
            return images
        images = images / 2 + 0.5
        stored = len(self._preparation.mean)
        if images.shape[1] == 3 and stored == 1:
            images = grey(images)
        elif images.shape[1] != stored:
            images = images.expand(-1, stored, -1, -1)
        preparation = replace(self._preparation, full_range=1.0)
        return preparation.apply(Batch(images, images), images.device, torch.contiguous_format).inputs
