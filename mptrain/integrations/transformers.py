"""Callback for `transformers.Trainer` that watches its updates (`mptrain.watch`)."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from typing_extensions import override

from mptrain.integrations.watch import WatchingCallback

#: Entries of the Trainer beside the metrics of an evaluation.
_NO_METRICS = frozenset({"epoch", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time"})


class Numerics(WatchingCallback, TrainerCallback):  # type: ignore[misc]
    """Callback that records each update's loss scale, skip and gradient norm, and what was not finite."""

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._start(parts["model"], parts["optimizer"], getattr(parts["optimizer"], "scaler", None))

    @override
    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self.watch is not None:
            named = {name.removeprefix("eval_"): value for name, value in parts["metrics"].items()}
            self.watch.evaluated({name: value for name, value in named.items() if name not in _NO_METRICS})

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._close()
