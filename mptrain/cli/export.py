"""``mptrain export``: writes the weights of a run as a plain state dict, and prints how to load it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mptrain.cli.messages import print_rows, warn
from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.config.targets import parameters
from mptrain.config.trust import is_allow_override, search_path
from mptrain.run.evaluation import Export, export_run
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.runlog.strict_json import read_object
from mptrain.system.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.config.schema import Config

#: Endings of files that ``export`` writes: safetensors; torch.save.
_SUFFIXES = ("", ".safetensors", ".pt", ".pth", ".bin", ".ckpt")


def export(arguments: Namespace) -> int:
    """Write the weights of a run's checkpoint as a plain state dict, and print how to load it.

    Args:
        arguments: Parsed command line: the run, options such as ``--fp16``, and ``extensions.allow=``.

    Returns:
        The exit code 0.

    Raises:
        MptrainError: An argument is invalid, the run has no usable checkpoint, or the file cannot be written.
    """
    if odd := [word for word in arguments.overrides if not is_allow_override(word)]:
        raise UsageError(f"export takes no KEY=VALUE but extensions.allow, and got '{odd[0]}'", "remove it")
    done = export_run(
        arguments.words[0],
        "best" if arguments.best else "last",
        torch.float16 if arguments.fp16 else torch.float32,
        average=not arguments.raw,
        output=_checked(arguments.output),
        trusted=arguments.overrides,
    )
    warn(done.warnings)
    kind = "averaged weights" if done.averaged else "weights"
    dtype = "float16" if arguments.fp16 else "float32"
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


def _checked(name: str | None) -> Path | None:
    """Return the path that ``--output`` names."""
    if name is None:
        return None
    output = Path(name)
    if output.is_dir():
        raise UsageError(f"--output {output} is a folder", "write the path of a file")
    if output.suffix not in _SUFFIXES:
        raise UsageError(
            f"--output {output}: export writes no files that end in '{output.suffix}'",
            f"end the name in .safetensors, or for a file of torch.save in {', '.join(_SUFFIXES[2:])}",
        )
    return output
