"""Names that 0.1 had for keys, values and targets: who types one is told the present name, and nothing accepts it."""

from __future__ import annotations

import re

from mptrain.config import location

#: Old key to new key.
KEYS = {
    "checkpoint.background": "checkpoint.async_save",
    "log.stalled": "log.stall_report_after",
    "scaler.refill": "scaler.hysteresis_reset",
    "scaler.uncounted_steps": "scaler.growth_delay",
    "train.patience": "train.max_consecutive_overflows",
}

#: Key to its old value and its new one.
VALUES = {"precision.cpu_kernels": {"widened": "upcast"}}

#: Packages whose parts are in the folders of `mptrain.workloads` and in `mptrain.probe` now.
_PACKAGES = ("mptrain.dataset.", "mptrain.diagnostics.", "mptrain.model.", "mptrain.task.")


def new_key(key: str) -> str:
    """Return the present name of a key, those of single learners included; empty where it was not renamed."""
    learner = re.match(r"learners\.[^.]+\.", key)
    prefix = learner.group() if learner else ""
    new = KEYS.get(key.removeprefix(prefix), "")
    return prefix + new if new else ""


def new_target(path: str) -> str:
    """Return the present path of a target, as the configuration files name it; empty where it was not moved."""
    if not path.startswith(_PACKAGES):
        return ""
    written = re.compile(rf"_target_: (mptrain\.[\w.]+\.{re.escape(path.rpartition('.')[2])})$", re.MULTILINE)
    files = sorted(location.configs().rglob("*.yaml"))
    return next((found for file in files for found in written.findall(file.read_text(encoding="utf-8"))), "")
