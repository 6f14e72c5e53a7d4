"""Callback for Lightning's Trainer that watches its updates; with Fabric call `mptrain.watch` itself."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override

from mptrain.integrations.watch import Watch, watch


class Numerics(Callback):  # type: ignore[misc]
    """Callback that records each update's loss scale, skip and gradient norm, and what was not finite.

    ``watch`` is that of the running or last training; None before the first. For ``every`` and ``dir`` see
    `mptrain.watch`; without ``dir`` no files are written.
    """

    def __init__(self, every: int = 100, dir: str | os.PathLike[str] | None = None) -> None:  # noqa: A002
        self.watch: Watch | None = None
        self._every, self._dir = every, dir

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.watch = watch(pl_module, trainer.optimizers, scaler, every=self._every, dir=self._dir)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self.watch is not None:
            self.watch.close()
