"""``mptrain export``: writes the weights or the network of a run to a file, and prints how to load it."""

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
from mptrain.numerics.words import number
from mptrain.run.evaluation import Export, export_run
from mptrain.run.network_export import ExportedNetwork
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.runlog.strict_json import read_object
from mptrain.system.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.config.schema import Config


def export(arguments: Namespace) -> int:
    """Write the weights or the network of a run's checkpoint to a file, and print how to load it.

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
        form=arguments.format,
        output=None if arguments.output is None else Path(arguments.output),
        trusted=arguments.overrides,
    )
    warn(done.warnings)
    kind = "averaged weights" if done.averaged else "weights"
    dtype = "float16" if arguments.fp16 else "float32"
    rows = [
        ("file", str(done.path)),
        ("content", f"{kind} of step {done.step:,}, {done.tensors} tensors, {dtype}, {readable_bytes(done.bytes)}"),
        *(_weights(done) if done.network is None else _network(done.path, done.network)),
        ("data", f"{done.data}: labels and input preparation" if done.data.exists() else ""),
    ]
    if done.network is None:
        line = shlex.join(["mptrain", *_words(done.config), f"model.weights={done.path}"])
        rows.append(("fine-tune", search_path(done.config.extensions.allow) + line))
    print_rows("exported", rows)
    return EXIT_OK


def _weights(done: Export) -> list[tuple[str, str]]:
    """Return rows that show how to load exported weights."""
    reader = f"torch.load({str(done.path)!r}, weights_only=True)"
    if done.form == "safetensors":
        reader = f"safetensors.torch.load_file({str(done.path)!r})"
    return [("load", f"model.load_state_dict({reader})"), ("model", _call(done))]


def _network(path: Path, network: ExportedNetwork) -> list[tuple[str, str]]:
    """Return rows about an exported network: what it takes and returns, its check, and how to run it."""
    load, run = f"network = torch.export.load({str(path)!r}).module()", f"network({network.arguments})"
    if path.suffix == ".onnx":
        named = ", ".join(f"{name!r}: {name}" for name in network.inputs)
        load, run = f"session = onnxruntime.InferenceSession({str(path)!r})", f"session.run(None, {{{named}}})"
    inputs = "; ".join(f"{name} {described}" for name, described in network.inputs.items())
    by, allowed = number(network.difference), number(network.tolerance)
    check = f"answers differ from torch's by {by} at most ({allowed} is allowed), for 1, 3 and 4 samples, "
    check += f"in {network.checked_with}"
    rows = {"inputs": inputs, "outputs": "; ".join(network.outputs), "checked": check, "load": load, "run": run}
    return [*rows.items()]


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
