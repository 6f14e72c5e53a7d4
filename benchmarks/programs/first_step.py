"""``mptrain`` with the words given, ended by force as soon as its first training step is done."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

STEP = "mptrain.engine.step"


class _EndAfterOneStep(MetaPathFinder, Loader):
    """Changes the module of the step when it is imported, so that importing happens as it does otherwise."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != STEP:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None
        self.loader = cast("Loader", found.loader)
        found.loader = self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        train_step = module.train_step

        def once(*args: Any, **kwargs: Any) -> None:
            train_step(*args, **kwargs)
            os._exit(0)

        module.train_step = once  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.meta_path.insert(0, _EndAfterOneStep())
    from mptrain.cli.main import main

    main()
    sys.exit("no step was trained")
