"""``mptrain export``: writes the weights of a run as a plain state dict, and prints how to load it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mptrain.cli.command_line import take_options
from mptrain.cli.messages import print_rows, warn
from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.config.targets import parameters
from mptrain.config.trust import is_allow_override, search_path
from mptrain.errors import EXIT_OK, UsageError
from mptrain.run.evaluation import Export, export_run
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.runlog.strict_json import read_object

if TYPE_CHECKING:
    from mptrain.config.schema import Config

_FLAGS = ("--best", "--raw", "--fp16", "--output PATH")

#: Endings of files that ``export`` writes: safetensors; torch.save.
_SUFFIXES = ("", ".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def export(words: Sequence[str]) -> int:
    """Write the weights of a run's checkpoint as a plain state dict, and print how to load it.

    Args:
        words: Arguments of the command: the run, flags such as ``--fp16``, and ``extensions.allow=``.

    Returns:
        The exit code 0.

    Raises:
        MptrainError: An argument is invalid, the run has no usable checkpoint, or the file cannot be written.
    """
    trusted = [word for word in words if is_allow_override(word)]
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
    reader = f"torch.load({str(done.path)!r}, weights_only=True)"
    if done.path.suffix == ".safetensors":
        reader = f"safetensors.torch.load_file({str(done.path)!r})"
    line = shlex.join(["mptrain", *_words(done.config), f"model.weights={done.path}"])
    rows = [
        ("file", str(done.path)),
        ("content", f"{kind} of step {done.step:,}, {done.tensors} tensors, {dtype}, {readable_bytes(done.bytes)}"),
        ("load", f"model.load_state_dict({reader})"),
        ("model", _call(done)),
        ("data", f"{done.data}: labels and input preprocessing" if done.data.exists() else ""),
        ("fine-tune", search_path(done.config.extensions.allow) + line),
    ]
    print_rows("exported", rows)
    return EXIT_OK


def _call(done: Export) -> str:
    """Return the call that constructs the model, including the arguments that depend on the data."""
    model = done.config.model
    card: dict[str, Any] = read_object(done.data) if done.data.exists() else {}
    told = {name: card[name] for name in parameters(model.resolve())[0] if name in card and name not in model.arguments}
    arguments = ", ".join(f"{name}={value!r}" for name, value in {**model.arguments, **told}.items())
    return f"{model.path}({arguments})"


def _words(config: Config) -> list[str]:
    """Return the overrides that select the same model and data, as far as the run records them."""
    groups = ("model.", "dataset", "task", "extensions.")
    words = [word for word in config.overrides if word.lstrip("+~").startswith(groups)]
    words = [word for word in words if not word.startswith("model.weights=")]
    chosen = config.chosen.get("model", "cnn")
    if chosen == config.model.path:  # model= names a target instead of an option
        return [*(word for word in config.overrides if word.startswith("model=")), *words]
    known = chosen in Catalogue([location.configs()]).groups["model"]
    return [*([] if known else ["--config-dir", "DIR"]), f"model={chosen}", *words]


def _read(words: Sequence[str]) -> tuple[str, Collection[str], Path | None]:
    """Return the run, the flags given, and the output path."""
    runs, found = take_options(words, {"--output": "PATH"}, _FLAGS[:3])
    if odd := [word for word in runs if word.startswith("-")] or runs[1:]:
        raise UsageError(f"unexpected argument '{odd[0]}'", f"mptrain export RUN [{'] ['.join(_FLAGS)}]")
    output = Path(found["--output"][-1]) if "--output" in found else None
    if output and output.is_dir():
        raise UsageError(f"--output {output} is a folder", "write the path of a file")
    if output and output.suffix not in _SUFFIXES:
        raise UsageError(
            f"--output {output}: export writes no files that end in '{output.suffix}'",
            f"end the name in .safetensors, or for a file of torch.save in {', '.join(_SUFFIXES[2:])}",
        )
    if not runs:
        raise UsageError("export needs a run directory", "write mptrain export last, or mptrain export PATH")
    return runs[0], found, output
