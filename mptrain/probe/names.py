"""Names of a model's modules and parameters as its author knows them, without the prefixes of wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

#: Attributes under which wrappers keep the module: torch.compile, DataParallel and DDP, Fabric (twice), checkpoints.
_WRAPPERS = frozenset(
    {"_orig_mod", "module", "_forward_module", "_original_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


def named_models(model: Models) -> dict[str, nn.Module]:
    """Return models by the prefix of their names: empty for a single one, else ``KEY.`` or ``0.``, ``1.`` ..."""
    if isinstance(model, nn.Module):
        return {"": model}
    given = model if isinstance(model, Mapping) else {str(at): one for at, one in enumerate(model)}
    return {f"{key}.": one for key, one in given.items()}


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by its id, in module order; a tied parameter has the first of its names.

    Parts of names that wrappers add are left out, unless two parameters would get the same name.
    """
    names: dict[int, str] = {}
    for prefix, model in models.items():
        full: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            full.setdefault(id(parameter), name)
        short = {key: without_wrappers(name) for key, name in full.items()}
        alike = len(set(short.values())) < len(short)
        for key, name in (full if alike else short).items():
            names.setdefault(key, prefix + name)
    return names


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of torch.compile, DataParallel, DDP and Fabric."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(module.module)
    inner = getattr(module, "_orig_mod", None) or getattr(module, "_original_module", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else module


def without_wrappers(name: str) -> str:
    """Return the name of a module or parameter without the attributes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
