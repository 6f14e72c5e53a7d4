"""Generative adversarial networks (Goodfellow et al. 2014): two losses, two learners, one network that holds both.

The losses are of logits in FP32: a sigmoid in FP16 is exactly 1 from 8.4 on, and the logarithm of what is missing to 1
is -inf. Noise is drawn in FP32 and then rounded, so that a seed draws the same in every precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from mptrain.device import in_widest
from mptrain.errors import ConfigError
from mptrain.fields import BelowOneOrZero
from mptrain.workloads.base.exhibits import Exhibit, Pictures
from mptrain.workloads.base.task import Objective, Task
from mptrain.workloads.images.classifier_features import ClassifierFeatures

if TYPE_CHECKING:
    from mptrain.workloads.base.batch import Batch

#: How many pictures to show of each kind.
SHOWN = 64


@dataclass(frozen=True)
class Gan(Task):
    """A generator and a discriminator, in this order of steps: discriminator, generator.

    The network has the children ``generator`` (noise ``[N, latent]`` to images from -1 to 1) and ``discriminator``
    (images to one logit each, ``[N]``) and an attribute ``latent``. Targets train nothing.

    Either loss says how the two compare, not how good the images are, so without a classifier no metric can choose a
    best checkpoint. With one, that is the Fréchet distance of what the classifier sees in real images and in as many drawn ones.

    Attributes:
        label_smoothing: How far below 1 the label of real images lies while training (0.1 in Salimans et al. 2016,
            section 3.4, who leave that of drawn images at 0). What is measured is the plain loss.
        classifier: The run of a classifier, ``train`` for a small one trained on the same data, or None for no score.
            What it names is found by who builds the task.
        features: What that classifier sees.
        metric: ``frechet`` where there are features.
    """

    label_smoothing: BelowOneOrZero = 0.0
    classifier: str | None = None
    features: ClassifierFeatures | None = None
    metric: str | None = field(init=False, default=None)

    higher_is_better = False
    shares = ("real_accuracy", "fake_accuracy", "classifier_top1")
    refuses = ("boxes",)  # such pictures are not normalised to the range of a tanh

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", None if self.features is None else "frechet")

    def objectives(self) -> tuple[Objective, ...]:
        """Two losses, each for the parameters of one network."""
        return (
            Objective(learner="discriminator", modules=("discriminator",), loss=self.discriminator_loss),
            Objective(learner="generator", modules=("generator",), loss=self.generator_loss),
        )

    def discriminator_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of real images plus that of as many drawn ones; float32 scalar.

        The two kinds are judged in passes of their own, so that BatchNorm sees one kind at a time. The generator gets
        no gradient.
        """
        generator, discriminator, noise = _parts(model, batch.inputs, batch.samples)
        with torch.no_grad():
            drawn = generator(noise)
        real = _cross_entropy(discriminator(batch.inputs), 1.0 - self.label_smoothing)
        return real.mean() + _cross_entropy(discriminator(drawn), 0.0).mean()

    def generator_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of as many drawn images as the batch has, against the label of real ones; float32 scalar.

        This is the loss that does not saturate while the discriminator wins (Goodfellow et al. 2014, section 3).
        """
        generator, discriminator, noise = _parts(model, batch.inputs, batch.samples)
        return _cross_entropy(discriminator(generator(noise)), 1.0).mean()

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Both losses, and whether the discriminator takes a real and a drawn image for what they are; float64 ``[N]``.

        The discriminator judges as in training, with BatchNorm's statistics of one kind at a time. Their running means
        are of both kinds and fit neither: by them, one that tells the two apart in training may call
        every image drawn.
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

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Mean losses in nats, accuracies as fractions."""
        return {name: total / terms for name, total in sums.items()}

    def answers(self, model: nn.Module, batch: Batch) -> Sequence[Any]:
        """Return the classifier's features, sample by sample.

        Of each: the features of its image and of a drawn one, float32 ``[D]``, and whether the classifier knows the
        image's class, or None where that cannot be told.
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

    def score(self, answers: Sequence[Any]) -> dict[str, float]:
        """``frechet``: see `frechet_distance`. ``classifier_top1``: how good a judge the classifier is of these data."""
        if len(answers) < 2:  # of which there is no covariance
            return {"frechet": float("nan")}
        real, drawn, right = zip(*answers, strict=True)
        known = {} if right[0] is None else {"classifier_top1": float(np.mean(right))}
        return {"frechet": frechet_distance(np.stack(real), np.stack(drawn)), **known}

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """``samples``: what the generator draws from the same noise each time.

        That noise comes from a source of its own, so that showing pictures does not change what is measured next.
        """
        source = torch.Generator(batch.inputs.device).manual_seed(0)
        generator, _, noise = _parts(model, batch.inputs, SHOWN, source)
        drawn = (generator(noise).float() / 2 + 0.5).clamp(0.0, 1.0)
        return {"samples": Pictures(drawn, "Drawn by the generator, from the same noise after each validation.")}


def _cross_entropy(logits: Tensor, label: float) -> Tensor:
    """Cross-entropy of each logit ``[N]`` with one label for all, in float32."""
    logits = logits.float()
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label), reduction="none")


def _parts(
    model: nn.Module, like: Tensor, samples: int, source: torch.Generator | None = None
) -> tuple[nn.Module, nn.Module, Tensor]:
    """The two networks, and noise ``[samples, latent]`` on the device and in the dtype of the inputs.

    Args:
        model: Holds the two.
        like: The inputs.
        samples: How many rows of noise.
        source: What the noise is drawn from; None means torch's default generator, whose state checkpoints keep.

    Raises:
        ConfigError: The network is not such a pair.
    """
    generator, discriminator = (getattr(model, name, None) for name in ("generator", "discriminator"))
    latent = getattr(model, "latent", None)
    if not (isinstance(generator, nn.Module) and isinstance(discriminator, nn.Module) and isinstance(latent, int)):
        raise ConfigError(
            f"task=gan trains a generator against a discriminator, but {type(model).__name__} is not such a pair",
            "choose model=dcgan, or a network with the children generator and discriminator and the number latent",
        )
    noise = torch.randn(samples, latent, device=like.device, generator=source).to(like.dtype)
    return generator, discriminator, noise


def frechet_distance(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """The squared Fréchet distance of two Gaussians that have the means and covariances of two samples.

    ``|m1 - m2|^2 + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2))`` (Dowson and Landau 1982), with which Heusel et al. 2017
    (section 2) score generators on features of Inception. With ``C1 = A'A`` and ``C2 = B'B``, A and B the centred samples
    over ``sqrt(n - 1)``, the eigenvalues of ``C1 C2`` are the squared singular values of ``A B'``, so the last trace is
    the sum of these. No root of a matrix is taken, so covariances without full rank, which fewer samples than features
    have, need no special care.

    The distance of finite samples is too large, the more so the fewer there are: compare only equal numbers.

    Args:
        one: Features ``[N, D]``, at least two samples.
        other: Features ``[M, D]``, likewise.

    Returns:
        The distance, at least 0, computed in float64; NaN where a feature is not finite.
    """
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("nan")
    mean, root = _gaussian(one.astype(np.float64))
    other_mean, other_root = _gaussian(other.astype(np.float64))
    common = np.linalg.svd(root @ other_root.T, compute_uv=False).sum()
    spread = (root**2).sum() + (other_root**2).sum() - 2.0 * common
    return float(max(((mean - other_mean) ** 2).sum() + spread, 0.0))


def _gaussian(samples: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean ``[D]``, and a matrix ``R`` with ``R'R`` the covariance, of at most D rows."""
    mean = samples.mean(0)
    root = (samples - mean) / np.sqrt(len(samples) - 1)
    if len(root) > root.shape[1]:
        root = np.linalg.qr(root, mode="r")
    return mean, root
