"""What is trained on a GPU, and in which sizes it is rehearsed."""

from __future__ import annotations

from benchmarks.cases.case import Setting
from benchmarks.loops.base import Work

SYNTHETIC = ("dataset=synthetic", "dataset.learnable=false")


def resnet50(setting: Setting, batch: int = 256) -> Work:
    """ResNet-50 on 1,000 classes of 224 x 224, channels last."""
    if setting.rehearsal:
        return _work(setting, "model=resnet18", *SYNTHETIC, *_images(16, 4, 10))
    return _work(setting, "model=resnet50", *SYNTHETIC, *_images(224, batch, 1000))


def vgg16(setting: Setting) -> Work:
    """VGG-16 on 1,000 classes of 224 x 224."""
    sizes = _images(32, 4, 10) if setting.rehearsal else _images(224, 64, 1000)
    return _work(setting, "model=vgg16", *SYNTHETIC, *sizes)


def resnet18(setting: Setting) -> Work:
    """ResNet-18 of small images: its kernels are short."""
    return _work(setting, "model=resnet18", *SYNTHETIC, *_images(32, 4 if setting.rehearsal else 32, 10))


def mlp(setting: Setting) -> Work:
    """The network of the CPU's suite."""
    return _work(setting, "model=mlp", "model.hidden=[64,64]", *SYNTHETIC, "dataset.channels=1", *_images(6, 32, 10))


def transformer(setting: Setting) -> Work:
    """A decoder of 12 blocks of width 1,024 over 512 characters."""
    width, layers, heads, length, batch = (32, 1, 2, 16, 2) if setting.rehearsal else (1024, 12, 16, 512, 16)
    return _work(
        setting,
        "model=transformer",
        f"model.width={width}",
        f"model.layers={layers}",
        f"model.heads={heads}",
        f"dataset.sequence_length={length}",
        f"train.batch_size={batch}",
        optimizer="adam",
    )


def seq2seq(setting: Setting) -> Work:
    """The paper's LSTM translator of 3 layers of 1,024, on the names of numbers."""
    sizes = ("model.width=16", "train.batch_size=4") if setting.rehearsal else ("train.batch_size=256",)
    return _work(setting, "model=seq2seq_3x1024", "train.clip_norm=null", *sizes)


def _images(side: int, batch: int, classes: int) -> tuple[str, ...]:
    return (
        f"dataset.image_size={side}",
        f"dataset.classes={classes}",
        f"dataset.samples={3 * batch}",
        f"dataset.val_samples={batch}",
        "dataset.test_samples=8",
        f"train.batch_size={batch}",
    )


def _work(setting: Setting, *words: str, optimizer: str = "sgd") -> Work:
    native = () if setting.device == "cuda" else ("precision.cpu_kernels=upcast",)
    return Work(words, optimizer=optimizer, device=setting.device, more=native, agree_lr=1e-3, batches=2)  # type: ignore[arg-type]
