"""Count what one training step executes of mptrain: distinct lines, functions, files, and changes of file.

python -m benchmarks.step_trace    # the default network in fp16_dynamic
python -m benchmarks.step_trace model=mlp precision=amp_bf16       # another one
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mptrain
from mptrain.config.compose import compose
from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from mptrain.run.build.parts import build

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(mptrain.__file__).parent
USUAL = ("model=cnn", "precision=fp16_dynamic", "precision.cpu_kernels=native", "device=cpu")

#: Steps before the one that is traced, which make what later ones share.
WARM_UP = 3


class Trace:
    """The lines of mptrain that are executed while it is on.

    Attributes:
        lines: File to the numbers of its lines.
        functions: File and name of each function.
        changes: How often execution went on in another file.
    """

    def __init__(self) -> None:
        self.lines: defaultdict[Path, set[int]] = defaultdict(set)
        self.functions: set[tuple[Path, str]] = set()
        self.changes = 0
        self._last: Path | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        """Trace a frame of mptrain; see `sys.settrace`."""
        file = Path(frame.f_code.co_filename)
        if not file.is_relative_to(ROOT):
            return None
        self.functions.add((file, f"{frame.f_code.co_firstlineno} {frame.f_code.co_name}"))
        if event == "line":
            self.lines[file].add(frame.f_lineno)
            self.changes += file != self._last
            self._last = file
        return self


def traced_step(overrides: Sequence[str]) -> Trace:
    """Return the trace of one training step of a configuration, after a few that are not traced."""
    parts, _ = build(compose(overrides))
    learner, trace = parts.learners[0], Trace()
    ring = Ring(WARM_UP + 1, len(learner.weights.names), parts.device)
    parts.model.train()
    for number, host_batch in zip(range(WARM_UP + 1), parts.loaders["train"].batches(0), strict=False):
        batch = parts.prepare(host_batch)
        if number == WARM_UP:
            sys.settrace(trace)
        try:
            ring.record(train_step(learner, parts.model, batch, parts.plan))
        finally:
            sys.settrace(None)
    return trace


def main() -> None:
    """Print the counts."""
    trace = traced_step(sys.argv[1:] or USUAL)
    for file, lines in sorted(trace.lines.items(), key=lambda one: -len(one[1])):
        print(f"{len(lines):5} {file.relative_to(ROOT)}")
    count = sum(map(len, trace.lines.values()))
    print(
        f"{count:5} lines, {len(trace.functions)} functions, {len(trace.lines)} files, {trace.changes} changes of file"
    )


if __name__ == "__main__":
    main()
