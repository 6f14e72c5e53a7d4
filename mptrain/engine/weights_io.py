"""Weights outside of runs: plain state dicts, as any program of the field writes and reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.errors import CheckpointError
from mptrain.numerics.rounding import saturated
from mptrain.runlog.checkpoint_data import NotPlain, load_plain

#: Where programs keep the weights inside of larger files, and what wrappers put before every name.
_HOLDERS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")


def plain_weights(state: Mapping[str, Any], *, average: bool) -> dict[str, Tensor]:
    """The weights of a run, from the state in its checkpoint.

    Args:
        state: What `mptrain.engine.snapshot.take_snapshot` gave.
        average: Take the average of each weight where there is one.

    Returns:
        A state dict: every parameter in its best precision (masters where there are any), every lasting buffer.
    """
    weights = {name: value for name, value in state["model"].items() if isinstance(value, Tensor)}
    if average:
        for learner in state["learners"].values():
            weights.update(learner["average"])
        weights.update({name: weights[first] for name, first in state["tied"].items()})
    return weights


def has_averages(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's state holds averages of the weights."""
    return any(learner["average"] for learner in state["learners"].values())


def in_dtype(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights with floating-point tensors in one dtype, contiguous; FP16 saturates at 65504.

    Each has memory of its own, but for tied ones, which stay tied.
    """
    made: dict[tuple[Any, ...], Tensor] = {}
    result = {}
    for name, value in weights.items():
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if place not in made or not value.numel():
            whole = saturated(value, dtype) if value.is_floating_point() else value
            made[place] = whole.cpu().clone(memory_format=torch.contiguous_format)
        result[name] = made[place]
    return result


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, also where it lies inside a larger mapping or has the prefix of a wrapper.

    Raises:
        CheckpointError: There is no such file, or no state dict in it.
    """
    try:
        content = load_plain(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"model.weights={path}: there is no such file", "give a state dict or a run") from error
    except (OSError, NotPlain) as error:
        raise CheckpointError(
            f"model.weights={path} cannot be read as tensors and nothing else",
            "save them with torch.save(model.state_dict(), PATH); a run is given by its directory",
        ) from error
    for holder in _HOLDERS:
        if isinstance(content, dict) and isinstance(content.get(holder), dict):
            content = content[holder]
    tensors = (
        {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if isinstance(content, dict)
        else {}
    )
    if not tensors:
        raise CheckpointError(
            f"model.weights={path} holds no state dict", "save one with torch.save(model.state_dict(), PATH)"
        )
    while prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in tensors)), ""):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


@dataclass(frozen=True)
class LoadReport:
    """How far weights fitted a model.

    Attributes:
        taken: Names of the tensors that the model took over.
        fresh: Names of those that it keeps as they were drawn, each with the reason.
        unused: Names of weights that the model has no place for.
    """

    taken: tuple[str, ...]
    fresh: tuple[tuple[str, str], ...]
    unused: tuple[str, ...]

    def describe(self, source: str) -> str:
        """One sentence for the person at the terminal."""
        sentence = f"{len(self.taken)} of {len(self.taken) + len(self.fresh)} tensors begin as in {source}"
        if self.fresh:
            sentence += f"; drawn afresh: {_listed([f'{name} ({why})' for name, why in self.fresh])}"
        if self.unused:
            sentence += f"; without a place in the model: {_listed(list(self.unused))}"
        return sentence


def load_matching(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> LoadReport:
    """Copy weights into a model by name, those that fit.

    A head for other classes has another shape; it stays as it was drawn.

    Raises:
        CheckpointError: Not a single parameter fits.
    """
    own = model.state_dict(keep_vars=True)
    fresh = [
        (name, "not there" if name not in weights else f"{tuple(weights[name].shape)}, not {tuple(value.shape)}")
        for name, value in own.items()
        if name not in weights or weights[name].shape != value.shape
    ]
    taken = tuple(name for name in own if name not in dict(fresh))
    if not set(taken) & dict(model.named_parameters()).keys():
        raise CheckpointError(
            f"no weight in {source} fits the model: {_listed([f'{name} ({why})' for name, why in fresh])}",
            f"it holds {_listed(list(weights))}: choose the model that these belong to",
        )
    with torch.no_grad():
        for name in taken:
            own[name].copy_(weights[name])
    return LoadReport(taken, tuple(fresh), tuple(name for name in weights if name not in own))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
