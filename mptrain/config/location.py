"""Location of the folders of YAML files; works from a wheel, an editable install and a checkout.

Must not import anything heavier than the standard library, because `mptrain --help` uses it.
"""

from __future__ import annotations

from pathlib import Path

from mptrain.system.errors import EnvironmentRefused

_PACKAGE = Path(__file__).resolve().parent.parent


def configs() -> Path:
    """Return mptrain's folder of configuration files, which holds ``train.yaml`` and one folder per group.

    Raise EnvironmentRefused if the installation has no such folder.
    """
    return _find("configs", "train.yaml")


def recipes() -> Path:
    """Return mptrain's folder of recipes (reproductions of published results), one folder per recipe.

    Raise EnvironmentRefused if the installation has no such folder.
    """
    return _find("recipes", "")


def _find(folder: str, inside: str) -> Path:
    # A wheel has a copy in the package; a checkout, and so an editable install, has it in the top folder.
    candidates = (_PACKAGE / "_data" / folder, _PACKAGE.parent / folder)
    for candidate in candidates:
        if (candidate / inside).exists():
            return candidate
    raise EnvironmentRefused(
        f"the folder {folder}/ of mptrain is missing; searched {' and '.join(map(str, candidates))}",
        "the installation is damaged: install mptrain again",
    )
