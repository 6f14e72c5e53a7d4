"""Callback for `transformers.Trainer` that watches its updates (`mptrain.watch`)."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback
from typing_extensions import override

from mptrain.integrations.watch import Watch, watch


class Numerics(TrainerCallback):  # type: ignore[misc]
    """Callback that records each update's loss scale, skip and gradient norm, and what was not finite.

    ``watch`` is that of the running or last training; None before the first. For ``every`` and ``dir`` see
    `mptrain.watch`; without ``dir`` no files are written.
    """

    def __init__(self, every: int = 100, dir: str | os.PathLike[str] | None = None) -> None:  # noqa: A002
        self.watch: Watch | None = None
        self._every, self._dir = every, dir

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        optimizer = parts["optimizer"]
        scaler = getattr(optimizer, "scaler", None)
        self.watch = watch(parts["model"], optimizer, scaler, every=self._every, dir=self._dir)

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self.watch is not None:
            self.watch.close()
