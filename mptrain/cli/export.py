"""The command that takes weights out of a run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mptrain.cli.messages import warn
from mptrain.cli.rows import print_rows
from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.config.targets import parameters
from mptrain.config.trust import is_trust
from mptrain.errors import EXIT_OK, UsageError
from mptrain.run.evaluation import Export, export_run
from mptrain.runlog.storage import readable_bytes
from mptrain.runlog.strict_json import read_object

if TYPE_CHECKING:
    from mptrain.config.schema import Config

_FLAGS = ("--best", "--raw", "--fp16", "--output PATH")


def export(words: Sequence[str]) -> int:
    """Write a run's weights as a plain state dict, and say how to load it.

    Args:
        words: The run and flags.

    Raises:
        MptrainError: A word that means nothing here, no usable checkpoint, or a disk that refuses.
    """
    trusted = [word for word in words if is_trust(word)]
    run, flags, output = _read([word for word in words if word not in trusted])
    done = export_run(
        run,
        "best" if "--best" in flags else "last",
        torch.float16 if "--fp16" in flags else torch.float32,
        average="--raw" not in flags,
        output=output,
        trusted=trusted,
    )
    warn(done.warnings)
    kind = "averaged weights" if done.averaged else "weights"
    dtype = "float16" if "--fp16" in flags else "float32"
    rows = [
        ("file", str(done.path)),
        ("content", f"{kind} of step {done.step:,}, {done.tensors} tensors, {dtype}, {readable_bytes(done.bytes)}"),
        ("load", f"model.load_state_dict(torch.load({str(done.path)!r}, weights_only=True))"),
        ("model", _call(done)),
        ("data", f"{done.data}: labels, and how inputs are prepared" if done.data.exists() else ""),
        ("tune", shlex.join(["mptrain", *_words(done.config), f"model.weights={done.path}"])),
    ]
    print_rows("exported", rows, sys.stdout)
    return EXIT_OK


def _call(done: Export) -> str:
    """The call that makes the model, with what it was told of the data."""
    model = done.config.model
    card = _card(done.data) if done.data.exists() else {}
    told = {name: card[name] for name in parameters(model.resolve())[0] if name in card and name not in model.arguments}
    arguments = ", ".join(f"{name}={value!r}" for name, value in {**model.arguments, **told}.items())
    return f"{model.path}({arguments})"


def _card(path: Path) -> dict[str, Any]:
    return read_object(path)


def _words(config: Config) -> list[str]:
    """The words that make the same model and data, as far as the run knows them."""
    groups = ("model.", "dataset", "task", "extensions.")
    words = [word for word in config.overrides if word.lstrip("+~").startswith(groups)]
    words = [word for word in words if not word.startswith("model.weights=")]
    chosen = config.chosen.get("model", "cnn")
    if chosen == config.model.path:  # a target took the place of the option's, and is among the words
        return [*(word for word in config.overrides if word.startswith("model=")), *words]
    known = chosen in Catalogue([location.configs()]).groups["model"]
    return [*([] if known else ["--config-dir", "DIR"]), f"model={chosen}", *words]


def _read(words: Sequence[str]) -> tuple[str, set[str], Path | None]:
    run, flags, output = "", set(), None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name == "--output":
            if not equals:
                value = rest.pop(0) if rest else ""
            if not value:
                raise UsageError("--output needs a value", "write --output PATH")
            output = Path(value)
            if output.is_dir():
                raise UsageError(f"--output {value} is a folder", "write the path of a file")
        elif word in ("--best", "--raw", "--fp16"):
            flags.add(word)
        elif word.startswith("-") or run:
            raise UsageError(f"'{word}' means nothing to export", f"mptrain export RUN [{'] ['.join(_FLAGS)}]")
        else:
            run = word
    if not run:
        raise UsageError("export needs a run directory", "write mptrain export last, or its path")
    return run, flags, output
