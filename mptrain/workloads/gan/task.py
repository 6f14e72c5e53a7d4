"""Task of generative adversarial networks (Goodfellow et al. 2014): two networks, each with its own loss and optimizer.

The losses take FP32 logits: an FP16 sigmoid is exactly 1 from 8.4 on, and the logarithm of 1 minus the sigmoid is -inf.
Noise is drawn in FP32 and then rounded, so that a seed gives the same noise in every precision. Generated pictures are
judged by their features in a trained classifier, which computes in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.device import in_widest
from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOneOrZero
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.preparation import Preparation, grey
from mptrain.workloads.base.task import Exhibit, Objective, Pictures, Task


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


#: Number of generated pictures to show.
SHOWN = 64


@dataclass(frozen=True)
class Gan(Task):
    """Task of adversarial training: the discriminator takes a step on each batch, then the generator.

    The network has the children ``generator`` (noise ``[N, latent]`` to images from -1 to 1) and ``discriminator``
    (images to one logit each, ``[N]``) and an attribute ``latent``. Training does not use targets.

    The losses compare the two networks and do not measure image quality, so without a classifier no metric selects the
    best checkpoint. With one the metric is ``frechet``, the Fréchet distance between its features of real images and of
    as many generated ones.

    Attributes:
        label_smoothing: Difference between 1 and the label of real images in training (0.1 in Salimans et al. 2016,
            section 3.4, who keep the label of generated images at 0). Evaluation uses the plain loss.
        classifier: Run of a classifier, ``train`` for a small one trained on the same data, or None for no score. The
            builder of the task resolves it to ``features``.
    """

    label_smoothing: BelowOneOrZero = 0.0
    classifier: str | None = None
    features: ClassifierFeatures | None = None
    metric: str | None = field(init=False, default=None)

    higher_is_better = False
    shares = ("real_accuracy", "fake_accuracy", "classifier_top1")
    refuses = ("boxes",)  # detection data sets do not normalise pictures to the range of tanh

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", None if self.features is None else "frechet")

    @override
    def objectives(self) -> tuple[Objective, ...]:
        return (
            Objective(learner="discriminator", modules=("discriminator",), loss=self.discriminator_loss),
            Objective(learner="generator", modules=("generator",), loss=self.generator_loss),
        )

    def discriminator_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of real images plus that of as many generated images; float32 scalar.

        Real images have the label 1 minus ``label_smoothing``, generated ones 0. They are evaluated in separate passes,
        so that BatchNorm sees one kind at a time. The generator gets no gradient.
        """
        generator, discriminator, noise = _parts(model, batch.inputs, batch.samples)
        with torch.no_grad():
            drawn = generator(noise)
        real = _cross_entropy(discriminator(batch.inputs), 1.0 - self.label_smoothing)
        return real.mean() + _cross_entropy(discriminator(drawn), 0.0).mean()

    def generator_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of generated images with the label of real images; float32 scalar.

        This is the non-saturating loss of Goodfellow et al. 2014, section 3. Real images give only number and dtype.
        """
        generator, discriminator, noise = _parts(model, batch.inputs, batch.samples)
        return _cross_entropy(discriminator(generator(noise)), 1.0).mean()

    @override
    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return losses in nats and discriminator hits (0 or 1) for real images and as many generated ones.

        The discriminator runs in training mode, so that BatchNorm uses the statistics of one kind of images at a time.
        The running statistics mix both kinds and fit neither: with them, a discriminator that separates the two in
        training may classify every image as generated.
        """
        generator, discriminator, noise = _parts(model, batch.inputs, batch.samples)
        images = generator(noise)
        discriminator.train()
        real, drawn = discriminator(batch.inputs), discriminator(images)
        discriminator.train(model.training)
        return {
            "discriminator_loss": in_widest(_cross_entropy(real, 1.0) + _cross_entropy(drawn, 0.0)),
            "generator_loss": in_widest(_cross_entropy(drawn, 1.0)),
            "real_accuracy": in_widest(real > 0),
            "fake_accuracy": in_widest(drawn < 0),
        }

    @override
    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        return {name: total / terms for name, total in sums.items()}

    @override
    def answers(self, model: nn.Module, batch: Batch) -> Sequence[Any]:
        """Return features (float32 ``[D]``) of each real and a generated image, and a hit; none without a classifier.

        The hit tells if the classifier predicts the real image's class, None if its classes are not those of the data.
        """
        if self.features is None:
            return ()
        generator, _, noise = _parts(model, batch.inputs, batch.samples)
        real, logits = self.features.extract(batch.inputs)
        drawn, _ = self.features.extract(generator(noise))
        right = [None] * batch.samples
        if self.features.labelled:
            right = (logits.argmax(1) == batch.targets).tolist()
        return list(zip(real.cpu().numpy(), drawn.cpu().numpy(), right, strict=True))

    @override
    def score(self, answers: Sequence[Any]) -> dict[str, float]:
        """Return ``frechet``, NaN for fewer than two samples, and the classifier's accuracy on real images."""
        if len(answers) < 2:  # too few for a covariance
            return {"frechet": float("nan")}
        real, drawn, right = zip(*answers, strict=True)
        known = {} if right[0] is None else {"classifier_top1": float(np.mean(right))}
        return {"frechet": frechet_distance(np.stack(real), np.stack(drawn)), **known}

    @override
    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """Return ``samples`` of the same noise each time, drawn separately to leave later measurements unchanged."""
        source = torch.Generator(batch.inputs.device).manual_seed(0)
        generator, _, noise = _parts(model, batch.inputs, SHOWN, source)
        drawn = (generator(noise).float() / 2 + 0.5).clamp(0.0, 1.0)
        return {"samples": Pictures(drawn, "Images from the generator, for the same noise after each validation.")}


def _cross_entropy(logits: Tensor, label: float) -> Tensor:
    """Return the cross-entropy of each logit ``[N]`` with one label for all, in float32."""
    logits = logits.float()
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label), reduction="none")


def _parts(
    model: nn.Module, like: Tensor, samples: int, source: torch.Generator | None = None
) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return the networks, and noise ``[samples, latent]``, by default of torch's generator, saved in checkpoints."""
    generator, discriminator = (getattr(model, name, None) for name in ("generator", "discriminator"))
    latent = getattr(model, "latent", None)
    if not (isinstance(generator, nn.Module) and isinstance(discriminator, nn.Module) and isinstance(latent, int)):
        raise ConfigError(
            f"task=gan needs a generator, a discriminator and latent, but {type(model).__name__} lacks one of them",
            "use model=dcgan, or a network with the children generator and discriminator and the integer latent",
        )
    noise = torch.randn(samples, latent, device=like.device, generator=source).to(like.dtype)
    return generator, discriminator, noise


def frechet_distance(features: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Return the squared Fréchet distance of two Gaussians with the means and covariances of two sets of features.

    The features, ``[N, D]`` and ``[M, D]``, are of at least two samples each. With classifier features of real and of
    generated images the distance measures image quality (lower is better). It is
    ``|m1 - m2|^2 + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2))`` (Dowson and Landau 1982), which Heusel et al. 2017
    (section 2) use with Inception features. Let ``C1 = A'A`` and ``C2 = B'B``, where A and B are the centred samples
    divided by ``sqrt(n - 1)``. The eigenvalues of ``C1 C2`` are the squared singular values of ``A B'``, so the last
    trace is the sum of these singular values. No matrix root is computed, so rank-deficient covariances, which occur
    with fewer samples than features, need no special treatment.

    The estimate is biased upwards, more so for fewer samples, so compare only equal numbers of samples. It is computed
    in float64; it is at least 0, or NaN where a feature is not finite.
    """
    if not (np.isfinite(features).all() and np.isfinite(other).all()):
        return float("nan")
    mean, root = _gaussian(features.astype(np.float64))
    other_mean, other_root = _gaussian(other.astype(np.float64))
    common = np.linalg.svd(root @ other_root.T, compute_uv=False).sum()
    spread = (root**2).sum() + (other_root**2).sum() - 2.0 * common
    return float(max(((mean - other_mean) ** 2).sum() + spread, 0.0))


def _gaussian(samples: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean ``[D]`` and a matrix ``R`` with at most D rows, for which ``R'R`` is the covariance."""
    mean = samples.mean(0)
    root = (samples - mean) / np.sqrt(len(samples) - 1)
    if len(root) > root.shape[1]:
        root = np.linalg.qr(root, mode="r")
    return mean, root
