"""Data set ``python_docs``: Python's language reference, about 370,000 characters, shipped with CPython for ``help()``.

The text is English and code. It differs slightly between versions of Python and not between machines.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Literal

from mptrain.system.errors import DataError
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.language.language_dataset import TextDataset, TextOptions, divide, windows_of

MODULE = "pydoc_data.topics"

_EMPTY_LINE = re.compile(r"\n[^\S\n]*\n")


@dataclass(frozen=True, kw_only=True)
class PythonDocsOptions(TextOptions):
    """Options of the data set ``python_docs`` besides those of `TextOptions`.

    Attributes:
        half: The first or the second half of the topics, in alphabetical order; None for all. The vocabulary is always
            that of all, so that a network that was trained on one half can be fine-tuned on the other.
    """

    half: Literal["first", "second"] | None = None


@takes_fields_of(PythonDocsOptions)
def load_python_docs(options: PythonDocsOptions) -> TextDataset:
    """Read Python's language reference and divide it, in the same way in every run of one version of Python.

    DataError is raised if this Python has no topics, ConfigError if the text is too short for the options.
    """
    topics = read_topics()
    every = parts = divide(topics, options.val_share, options.test_share)
    if options.half is not None:
        middle = len(topics) // 2
        half = topics[:middle] if options.half == "first" else topics[middle:]
        parts = divide(half, options.val_share, options.test_share)
    return windows_of("python_docs", parts, options, faults={}, files={}, learn_from=every["train"])


def read_topics() -> list[str]:
    """Return the topics of Python's language reference in alphabetical order, each ending with an empty line.

    A paragraph that occurred before is left out. A fifth of the text occurs twice, because large topics include small
    ones. A test on paragraphs that also occur in the training text would measure nothing.
    """
    try:
        topics: dict[str, str] = importlib.import_module(MODULE).topics
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"this Python has no {MODULE}: {error}",
            "install the complete standard library, or use your own text: dataset=text dataset.path=FILE",
        ) from error
    seen: set[str] = set()
    documents = []
    for _, topic in sorted(topics.items()):
        paragraphs = []
        for paragraph in _EMPTY_LINE.split(topic.strip("\n")):
            words = " ".join(paragraph.split())
            if words not in seen:
                seen.add(words)
                paragraphs.append(paragraph)
        if paragraphs:
            documents.append("\n\n".join(paragraphs) + "\n\n")
    return documents
