"""A list of modules to keep in FP32 that grows while offenders are found, and follows them through all modules of their kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from mptrain.precision.apply import kept_modules


@dataclass(frozen=True)
class Kept:
    """Entries of ``precision.keep_fp32``, beside those that a configuration has.

    Attributes:
        model: Whose modules are meant.
        before: Modules that were kept to begin with.
        entries: Qualified names, patterns of them, and class names.
        classes: The class of each module.
    """

    model: nn.Module
    before: Collection[str]
    entries: tuple[str, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, before: Collection[str]) -> Kept:
        """Return an empty list.

        Args:
            model: Built and cast.
            before: Modules that are kept already.
        """
        return cls(model, before, classes={name: type(module).__name__ for name, module in model.named_modules()})

    def with_module(self, module: str) -> Kept | None:
        """Return the list with one more offender; one that is kept already gives way to what is around it.

        A kept module answers in the dtype that it was given, so what it computes must fit there; within a kept module it need not.
        Where a module of the same class is in the list, one entry takes the place of both: the class, where it is the user's or
        a library's own; of a class of torch.nn, which says little about what a module does, a pattern of their names.

        Args:
            module: Where values are wrong now.

        Returns:
            None where nothing is left but the whole model, or nothing changes.
        """
        entries = self.entries
        covered = {name: self._selected(entry) for entry in entries for name in [entry]}
        inside = {name for names in covered.values() for name in names}
        while module in self.before or any(f"{module}.".startswith(f"{name}.") for name in inside):
            module = module.rpartition(".")[0]
            if not module:
                return None
        entries = tuple(entry for entry in entries if not all(name.startswith(f"{module}.") for name in covered[entry]))
        alike = [entry for entry in entries if self._is_alike(covered[entry], module)]
        if alike:
            together = self._together(module, {name for entry in alike for name in covered[entry]})
            if together is not None:
                return self._with((*(entry for entry in entries if entry not in alike), together))
        return self._with((*entries, module))

    def _with(self, entries: tuple[str, ...]) -> Kept | None:
        return None if entries == self.entries else Kept(self.model, self.before, entries, self.classes)

    def _selected(self, entry: str) -> set[str]:
        """The modules that an entry names."""
        return set(kept_modules(self.model, (entry,)))

    def _is_alike(self, names: set[str], module: str) -> bool:
        return any(self.classes[name] == self.classes[module] for name in names)

    def _together(self, module: str, others: set[str]) -> str | None:
        """One entry for modules of one class; None where it would name others too."""
        kind = self.classes[module]
        same = {name for name, one in self.classes.items() if one == kind}
        whole = "" in same or any(
            f"{inner}.".startswith(f"{name}.") for name in same for inner in same if inner != name
        )
        if not hasattr(nn, kind) and not whole and self._selected(kind) == same:
            return kind
        parts = [name.split(".") for name in (module, *sorted(others))]
        if len({len(one) for one in parts}) > 1:
            return None
        pattern = ".".join(one[0] if len(set(one)) == 1 else "*" for one in zip(*parts, strict=True))
        return pattern if pattern.strip("*.") and self._selected(pattern) <= same else None
