"""Python's own reference, some 370,000 characters of English and code that every CPython carries for its ``help()``.

It differs a little between versions of Python, and nowhere else.
"""

from __future__ import annotations

import importlib
import re

from mptrain.errors import DataError
from mptrain.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.language.language_dataset import Choices, TextDataset, windows_of
from mptrain.workloads.language.text_partition import divide
from mptrain.workloads.text.tokens import Tokens

MODULE = "pydoc_data.topics"

_EMPTY_LINE = re.compile(r"\n[^\S\n]*\n")


def load_python_docs(
    *,
    tokens: Tokens = "word",
    sequence_length: PositiveInt = 128,
    stream: bool = True,
    min_count: PositiveInt = 2,
    max_vocabulary: PositiveInt | None = None,
    val_share: BelowOneOrZero = 0.1,
    test_share: BelowOneOrZero = 0.1,
    train_samples: PositiveInt | None = None,
    batch_size: PositiveInt = 32,
) -> TextDataset:
    """Read the topics in alphabetical order and divide them, the same in every run of one version of Python.

    Args:
        tokens: ``word``: words, numbers and punctuation marks, the same mark several times over being one;
            ``char``: characters; ``space``: what stands between spaces, and line ends.
        sequence_length: Tokens of a sample.
        stream: Each batch continues the one before, for networks that carry state; False makes samples independent.
        min_count: Tokens that occur less often in the training text are all the same unknown one.
        max_vocabulary: At most so many tokens have numbers, the most frequent; None for no limit.
        val_share: Share of the text held out for validation.
        test_share: Share of the text to test on.
        train_samples: Train on so many samples only; None trains on all.
        batch_size: Of the run: how many places of the text are read at a time.

    Raises:
        DataError: This Python came without its topics.
        ConfigError: The text is too short for what is asked.
    """
    choices = Choices(
        tokens, sequence_length, stream, min_count, max_vocabulary, val_share, test_share, train_samples, batch_size
    )
    return windows_of("python_docs", divide(read_topics(), val_share, test_share), choices, faults={})


def read_topics() -> list[str]:
    """The topics in alphabetical order, each without the paragraphs that stood in one before it.

    A fifth of the topics' text is there twice, because large topics include small ones. Test text that was trained on
    in another topic would say nothing.

    Raises:
        DataError: This Python came without them.
    """
    try:
        topics: dict[str, str] = importlib.import_module(MODULE).topics
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"this Python has no {MODULE}: {error}",
            "install the whole standard library, or give text of your own with dataset=text dataset.path=FILE",
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
