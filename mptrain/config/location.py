"""Finds the folders of configuration files by path; works from a wheel, an editable install and a checkout.

Must not import anything heavier than the standard library: `mptrain --help` goes through here.
"""

from __future__ import annotations

from pathlib import Path

from mptrain.errors import EnvironmentRefused

_PACKAGE = Path(__file__).resolve().parent.parent


def configs() -> Path:
    """The folder that holds ``train.yaml`` and one folder for each group.

    Raises:
        EnvironmentRefused: The installation has no such folder.
    """
    return _find("configs", "train.yaml")


def recipes() -> Path:
    """The folder of recipes.

    Raises:
        EnvironmentRefused: The installation has no such folder.
    """
    return _find("recipes", "")


def _find(folder: str, inside: str) -> Path:
    # The copy inside a wheel, then the top folder of a checkout (editable installs point there too).
    candidates = (_PACKAGE / "_data" / folder, _PACKAGE.parent / folder)
    for candidate in candidates:
        if (candidate / inside).exists():
            return candidate
    raise EnvironmentRefused(
        f"the folder {folder}/ of mptrain is missing; looked at {' and '.join(map(str, candidates))}",
        "the installation is damaged: install mptrain again",
    )
