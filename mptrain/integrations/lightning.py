"""Callback for Lightning's Trainer that watches its updates; with Fabric call `mptrain.watch` itself."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override

from mptrain.integrations.watch import WatchingCallback


class Numerics(WatchingCallback, Callback):  # type: ignore[misc]
    """Callback that records each update's loss scale, skip and gradient norm, and what was not finite."""

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        steps = trainer.global_step // max(1, len(trainer.optimizers))  # it counts those of all optimizers
        self._start(pl_module, trainer.optimizers, getattr(trainer.precision_plugin, "scaler", None), steps)

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("val")}
        if not trainer.sanity_checking:
            self._evaluated({name.removeprefix("val_"): value for name, value in metrics.items()})

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()
