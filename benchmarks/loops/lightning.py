"""The loop that Lightning's users have: a module, a Trainer, its logger."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.loops.base import Mode, Work, materials
from benchmarks.loops.fabric import PRECISIONS, LossModule, plain

if TYPE_CHECKING:
    from mptrain.workloads.base.batch import Batch


class Lightning:
    """``Trainer.fit`` over prepared batches, without validation, bars and checkpoints.

    Args:
        work: What to train.
        mode: ``fp32``, ``tf32`` or ``amp``.
        log: Log loss and scale of every step to CSV.
    """

    def __init__(self, work: Work, mode: Mode, *, log: bool = False) -> None:
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        given = materials(work, mode)
        self.device, self.batches = work.device, given.batches
        self._folder = tempfile.TemporaryDirectory()
        self.module = _module(given, log=log)
        self._clock = _clock(work.device)
        self._options: dict[str, Any] = {
            "accelerator": "cpu" if work.device == "cpu" else "cuda",
            "devices": 1,
            "max_epochs": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": self._folder.name,
            "callbacks": [self._clock],
            "logger": False,
        }
        if log:
            from lightning.pytorch.loggers import CSVLogger

            self._options |= {"logger": CSVLogger(self._folder.name), "log_every_n_steps": 1}
        if mode == "amp" and work.device == "cpu":
            from lightning.pytorch.plugins import MixedPrecision

            self._options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
        else:
            self._options["precision"] = PRECISIONS.get(mode, "32-true")
        self._trainer = lightning.Trainer

    def block(self, steps: int) -> float:
        """Seconds between the begin of the first step of a fit and the end of its last."""
        self._fit(steps)
        return float(self._clock.ended - self._clock.began)

    def losses(self, steps: int) -> list[float]:
        """The losses that training_step returned."""
        self.module.kept = []
        self._fit(steps)
        found, self.module.kept = [float(loss) for loss in self.module.kept], None
        return found

    def close(self) -> None:
        """Forget what it wrote."""
        self._folder.cleanup()

    def _fit(self, steps: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = self._trainer(**self._options)
            trainer.fit(self.module, _Repeated(self.batches, steps))


class _Repeated:
    """So many batches, in turn."""

    def __init__(self, batches: list[Batch], steps: int) -> None:
        self._batches, self._steps = [plain(batch) for batch in batches], steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Any:
        return (self._batches[index % len(self._batches)] for index in range(self._steps))


def _module(given: Any, *, log: bool) -> Any:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = LossModule(given)
            self.made: torch.optim.Optimizer | None = None
            self.kept: list[torch.Tensor] | None = None

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.inner(batch)
            if self.kept is not None:
                self.kept.append(loss.detach())
            if log:
                self.log("loss", loss.detach())
                scaler = getattr(self.trainer.precision_plugin, "scaler", None)
                self.log("scale", scaler.get_scale() if scaler else 1.0)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if self.made is None:
                self.made = given.optimizer()  # one for all fits
            return self.made

        def transfer_batch_to_device(self, batch: Any, device: torch.device, index: int) -> Any:
            return batch

    return Module()


def _clock(device: str) -> Any:
    import lightning

    class Clock(lightning.Callback):  # type: ignore[misc]
        began = ended = 0.0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == 0:
                if device != "cpu":
                    torch.cuda.synchronize()
                self.began = time.perf_counter()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if device != "cpu":
                torch.cuda.synchronize()
            self.ended = time.perf_counter()

    return Clock()
