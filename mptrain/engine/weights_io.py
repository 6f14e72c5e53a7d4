"""Reading and writing of model weights outside of runs, as plain state dicts."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mptrain.numerics.tensors import saturated
from mptrain.runlog.checkpoint_data import NotPlain, load_plain
from mptrain.system.errors import CheckpointError, UsageError
from mptrain.system.machine import load_extra
from mptrain.system.torch_private import EXTRA_STATE
from mptrain.system.words import listed

#: Keys under which programs store a state dict in a larger file, and name prefixes that wrappers add.
_HOLDERS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")


def plain_weights(state: Mapping[str, Any], *, average: bool) -> dict[str, Any]:
    """Return a model's state dict from the state in a run's checkpoint.

    It has every parameter in full precision, with ``average`` the moving average of each that has one, every persistent
    buffer, and the extra state of each module that has one (`torch.nn.Module.get_extra_state`).
    """
    weights = dict(state["model"])
    if average:
        for learner in state["learners"].values():
            weights.update(learner["average"])
        weights.update({name: weights[first] for name, first in state["tied"].items()})
    return weights


def has_averages(state: Mapping[str, Any]) -> bool:
    """Return whether the state in a checkpoint has exponential moving averages of the weights."""
    return any(learner["average"] for learner in state["learners"].values())


def is_weight(name: str, value: object) -> bool:
    """Return whether an entry of a state dict is a parameter or buffer, not the extra state of a module."""
    return isinstance(value, Tensor) and name.rpartition(".")[2] != EXTRA_STATE


def set_extra_states(model: nn.Module, weights: Mapping[str, Any], source: str) -> None:
    """Give each module its extra state of a state dict; CheckpointError, which names ``source``, if it refuses it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, value in weights.items():
        owner, _, last = name.rpartition(".")
        if last == EXTRA_STATE and owner in modules:
            try:
                modules[owner].set_extra_state(value)
            except Exception as error:  # a module of a user may raise anything
                message = str(error).partition("\n")[0]
                what = f"{name} of {source} cannot be set: {type(error).__name__}: {message}"
                raise CheckpointError(what, f"it is for {type(modules[owner]).__name__}.set_extra_state") from error


def in_dtype(weights: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a contiguous copy of a state dict in CPU memory, with floating-point weights in one dtype.

    FP16 saturates at 65504. Each weight has memory of its own, except tied ones, which stay tied. Extra states of
    modules stay as they are.
    """
    made: dict[tuple[Any, ...], Tensor] = {}
    result: dict[str, Any] = {}
    for name, value in weights.items():
        if not is_weight(name, value):
            result[name] = value
            continue
        key = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if key not in made or not value.numel():
            whole = saturated(value, dtype) if value.is_floating_point() else value
            made[key] = whole.cpu().clone(memory_format=torch.contiguous_format)
        result[name] = made[key]
    return result


def read_weights(path: Path) -> dict[str, Any]:
    """Read a state dict from a file of `torch.save` or safetensors that another program may have written.

    It has tensors, and the extra states of modules. It may be inside a larger mapping (under ``state_dict``,
    ``model_state_dict`` or ``model``), and its names may have the prefix of a wrapper (``module.`` or ``_orig_mod.``),
    which is removed. Raises CheckpointError if the file does not exist or has no state dict, EnvironmentRefused if
    safetensors is not installed.
    """
    try:
        content = _read_safetensors(path) if path.suffix == ".safetensors" else load_plain(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"model.weights={path}: there is no such file", "give a file with a state dict, or a run"
        ) from error
    except (OSError, NotPlain) as error:
        raise CheckpointError(
            f"model.weights={path} cannot be read as a file of plain tensors",
            "save the weights with torch.save(model.state_dict(), PATH); name a run by its directory",
        ) from error
    for holder in _HOLDERS:
        if isinstance(content, dict) and isinstance(content.get(holder), dict):
            content = content[holder]
    tensors = (
        {
            str(name): value
            for name, value in content.items()
            if isinstance(value, Tensor) or str(name).rpartition(".")[2] == EXTRA_STATE
        }
        if isinstance(content, dict)
        else {}
    )
    if not tensors:
        raise CheckpointError(
            f"model.weights={path} has no state dict", "save one with torch.save(model.state_dict(), PATH)"
        )
    while prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in tensors)), ""):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def _read_safetensors(path: Path) -> dict[str, Any]:
    if not path.is_file():  # opening a named pipe would wait
        raise FileNotFoundError(path)
    library = load_extra("safetensors", "timm", "a .safetensors file")
    try:
        with library.safe_open(path, "pt") as file:
            notes = {name: text for name, text in (file.metadata() or {}).items() if name.endswith(EXTRA_STATE)}
            return {name: file.get_tensor(name) for name in file.keys()} | {  # noqa: SIM118 (no mapping)
                name: json.loads(text) for name, text in notes.items()
            }
    except (library.SafetensorError, ValueError, RecursionError) as error:
        raise NotPlain(str(error)) from error


def weights_file(weights: Mapping[str, Any], path: Path) -> bytes:
    """Return the content of a weights file: safetensors if the path ends in ``.safetensors``, else as of `torch.save`.

    The tensors are contiguous and in host memory. A safetensors file contains each tensor that has several names once
    for each name, and extra states of modules that are JSON values as metadata.

    Raises:
        UsageError: A safetensors file cannot hold an extra state.
        EnvironmentRefused: safetensors is not installed.
    """
    if path.suffix == ".safetensors":
        library = load_extra("safetensors.torch", "timm", "a .safetensors file")
        notes = {name: _as_json(name, value) for name, value in weights.items() if not isinstance(value, Tensor)}
        tensors = {name: value.contiguous().clone() for name, value in weights.items() if name not in notes}
        return cast("bytes", library.save(tensors, notes or None))
    file = io.BytesIO()
    torch.save(dict(weights), file)
    return file.getvalue()


def _as_json(name: str, value: object) -> str:
    """Return a value as JSON from which it can be read back; UsageError if it cannot."""
    try:
        text = json.dumps(value)
        same = json.loads(text) == value
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise UsageError(
            f"{name} is no tensor and no JSON value, and safetensors holds nothing else",
            "--format state_dict (.pt) holds it",
        )
    return text


@dataclass(frozen=True)
class LoadReport:
    """Report on loading a state dict: tensors loaded, tensors with initial values and reasons, unused weights."""

    taken: tuple[str, ...]
    fresh: tuple[tuple[str, str], ...]
    unused: tuple[str, ...]

    @property
    def is_doubtful(self) -> bool:
        """True if fewer than half of the model's tensors were loaded."""
        return len(self.taken) < len(self.fresh)

    def describe(self, source: str) -> str:
        """Return one sentence for the user: numbers of tensors loaded from ``source``, and names of the others."""
        sentence = f"{len(self.taken)} of {len(self.taken) + len(self.fresh)} tensors loaded from {source}"
        if self.is_doubtful:
            sentence += ", fewer than half: they look like weights of another architecture"
        if self.fresh:
            sentence += f"; not loaded: {listed([f'{name} ({why})' for name, why in self.fresh])}"
        if self.unused:
            sentence += f"; not in the model: {listed(list(self.unused))}"
        return sentence


def load_matching(model: nn.Module, weights: Mapping[str, Any], source: str) -> LoadReport:
    """Copy the weights that fit into a model, by name and shape; others are left out, as for transfer learning.

    Tensors of another shape, such as a head for other classes, keep their initial values. A module takes its extra
    state by name. Names of transformers' weights may lack the name of the network below the head. Raises
    CheckpointError if no parameter fits, or a module refuses its extra state.
    """
    own = model.state_dict(keep_vars=True)
    base = f"{getattr(model, 'base_model_prefix', '')}."
    weights = {name if name in own or base + name not in own else base + name: weights[name] for name in weights}
    shapes = {name: getattr(value, "shape", ()) for name, value in weights.items()}
    fresh = [
        (name, "missing" if name not in weights else f"{tuple(shapes[name])}, not {tuple(value.shape)}")
        for name, value in own.items()
        if name not in weights or (is_weight(name, value) and shapes[name] != value.shape)
    ]
    taken = tuple(name for name in own if name not in dict(fresh))
    if not set(taken) & dict(model.named_parameters()).keys():
        raise CheckpointError(
            f"no weight in {source} fits the model: {listed([f'{name} ({why})' for name, why in fresh])}",
            f"it has {listed(list(weights))}: choose the model that these belong to",
        )
    with torch.no_grad():
        for name in taken:
            if is_weight(name, own[name]):
                own[name].copy_(weights[name])
    set_extra_states(model, {name: weights[name] for name in taken}, source)
    return LoadReport(taken, tuple(fresh), tuple(name for name in weights if name not in own))
