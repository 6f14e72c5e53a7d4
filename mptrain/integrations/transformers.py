"""Callback for `transformers.Trainer` that watches its updates (`mptrain.watch`)."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from typing_extensions import override

from mptrain.integrations.watch import WatchingCallback


class Numerics(WatchingCallback, TrainerCallback):  # type: ignore[misc]
    """Callback that records each update's loss scale, skip and gradient norm, and what was not finite."""

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        optimizer = parts["optimizer"]
        self._start(parts["model"], optimizer, getattr(optimizer, "scaler", None), getattr(state, "global_step", 0))

    @override
    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._evaluated({name.removeprefix("eval_"): value for name, value in parts["metrics"].items()})

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._close()
