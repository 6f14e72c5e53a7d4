"""Data set ``docstrings``: paragraphs of docstrings of Python's standard library, with the package that they describe.

The text differs slightly between versions of Python and not between machines.
"""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

from mptrain.system.errors import DataError
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.text.labelled_dataset import Labelled, LabelledDataset, LabelledOptions, labelled_as_dataset

#: Packages of the standard library with many docstrings, which small installations of Python have too.
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@takes_fields_of(LabelledOptions)
def load_docstrings(options: LabelledOptions) -> LabelledDataset:
    """Read the docstrings of eight packages of the standard library; the label of a paragraph is its package.

    The source files are parsed and not run. Paragraphs that occur in two packages are left out. DataError is raised if
    this Python has no source files of these packages, ConfigError if there are too few paragraphs for the options.
    """
    library = Path(sysconfig.get_path("stdlib"))
    owners: dict[str, set[str]] = {}
    for package in PACKAGES:
        for file in sorted((library / package).rglob("*.py")):
            if not {"test", "tests"} & {*file.relative_to(library).parts}:
                for paragraph in _paragraphs(file):
                    owners.setdefault(paragraph, set()).add(package)
    texts = [Labelled(min(packages), text) for text, packages in owners.items() if len(packages) == 1]
    if missing := sorted({*PACKAGES} - {sample.label for sample in texts}):
        raise DataError(
            f"docstrings: {library} has no docstrings of {', '.join(missing)}",
            "install the complete standard library, or use your own texts: dataset=labelled_text dataset.path=FILE",
        )
    return labelled_as_dataset("docstrings", {"train": texts}, options, {"train": Faults()}, {})


def _paragraphs(file: Path) -> list[str]:
    """Return the paragraphs of the docstrings of a file but for single words, with white space collapsed."""
    nodes = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, _DOCUMENTED)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    paragraphs = [" ".join(part.split()) for text in texts for part in text.split("\n\n")]
    return [paragraph for paragraph in paragraphs if " " in paragraph]
