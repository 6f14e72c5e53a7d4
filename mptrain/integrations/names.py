"""Names of a model's parameters as its author knows them, in module order, without the prefixes of wrappers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

#: Attributes under which wrappers keep the module: torch.compile, DataParallel and DDP, Fabric (twice), checkpoints.
_WRAPPERS = frozenset(
    {"_orig_mod", "module", "_forward_module", "_original_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)


def parameter_names(models: Iterable[nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by its id, in module order; a tied parameter has the first of its names.

    Parts of names that wrappers add are left out, unless two parameters would get the same name.
    """
    names: dict[int, str] = {}
    for model in models:
        full = {id(parameter): name for name, parameter in reversed([*model.named_parameters(remove_duplicate=False)])}
        ordered = {id(parameter): full[id(parameter)] for parameter in model.parameters()}
        short = {key: _without_wrappers(name) for key, name in ordered.items()}
        alike = len(set(short.values())) < len(short)
        for key, name in (ordered if alike else short).items():
            names.setdefault(key, name)
    return names


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
