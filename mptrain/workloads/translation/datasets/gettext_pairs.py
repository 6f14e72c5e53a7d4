"""Messages of programs and their translations, from the catalogs that installed packages carry."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mptrain.errors import DataError
from mptrain.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.text.subwords import Pieces
from mptrain.workloads.translation.datasets.catalogs import read_compiled, read_text
from mptrain.workloads.translation.pair_dataset import Choices, PairDataset, pairs_as_dataset
from mptrain.workloads.translation.pair_partition import Pair, distinct, divide_pairs, tidied

_READERS = {".mo": read_compiled, ".po": read_text}


def load_gettext(
    *,
    package: str | None = "django",
    path: Path | None = None,
    language: str = "fr",
    name: str = "gettext",
    pieces: Pieces = "bpe",
    vocabulary: PositiveInt = 2000,
    target_vocabulary: PositiveInt | None = None,
    shared: bool = False,
    max_tokens: PositiveInt = 100,
    val_share: BelowOneOrZero = 0.1,
    test_share: BelowOneOrZero = 0.1,
    train_samples: PositiveInt | None = None,
    on_error: OnError = "stop",
    batch_size: PositiveInt = 32,
) -> PairDataset:
    """Read every catalog ``LANGUAGE/LC_MESSAGES/*.mo`` and ``*.po`` below a package's folder, or below another one.

    Messages with a context or plural forms are left out, and those that nobody translated. The package is located, and not
    imported.

    Args:
        package: The name of an installed package; its wheel carries the catalogs.
        path: A folder to look in instead, such as /usr/share/locale; None looks in the package.
        language: As the folders are called: fr, de, pt_BR.
        name: What to call the data set in records.
        pieces: What a token is.
        vocabulary: Tokens of the source language, or of both where they are shared.
        target_vocabulary: Tokens of the target language; None for as many.
        shared: One vocabulary for both languages.
        max_tokens: Pairs with more on a side are left out.
        val_share: Share of the messages for validation.
        test_share: Share of the messages to test on.
        train_samples: Train on so many pairs only; None trains on all.
        on_error: What to do about damaged catalogs.
        batch_size: Of the run.

    Raises:
        EnvironmentRefused: sentencepiece is not installed.
        DataError: There is no such package or no catalog of the language, or a catalog is damaged.
        ConfigError: There are too few messages for what is asked.
    """
    folders = [path.expanduser()] if path is not None else package_folders(name, package or "")
    files = [file for folder in folders for file in find_catalogs(folder, language)]
    if not files:
        raise DataError(
            f"{name}: no catalog {language}/LC_MESSAGES/*.mo or *.po in {', '.join(map(str, folders))}",
            f"{_languages(folders)}; dataset=number_words needs no files",
        )
    faults = Faults(on_error)
    read = [pair for file in files for pair in _pairs_in(file, faults)]
    pairs = distinct(read)
    if not pairs:
        raise DataError(f"{name}: no message is translated in {files[0]}", "choose another language or package")
    choices = Choices(pieces, vocabulary, target_vocabulary, shared, max_tokens, train_samples, batch_size)
    dataset = pairs_as_dataset(name, divide_pairs(pairs, val_share, test_share), choices, {"train": faults})
    dataset.repeated = len(read) - len(pairs)
    dataset.files = {"train": [str(file) for file in files]}
    return dataset


def package_folders(name: str, package: str) -> list[Path]:
    """Where an installed package lies.

    Raises:
        DataError: There is none of that name.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise DataError(
            f"{name}: there is no installed package {package!r}",
            f"pip install {package or 'django'}, or set dataset.path to a folder of catalogs",
        )
    return [Path(folder) for folder in folders]


def find_catalogs(folder: Path, language: str) -> list[Path]:
    """The catalogs of a language below a folder; of two that differ in the suffix only the compiled one."""
    found = [file for file in folder.rglob(f"{language}/LC_MESSAGES/*") if file.suffix in _READERS and file.is_file()]
    return sorted({file.with_suffix(""): file for file in sorted(found, reverse=True)}.values())


def _languages(folders: list[Path]) -> str:
    there = sorted({place.parent.name for folder in folders for place in folder.rglob("*/LC_MESSAGES")})
    return (
        f"dataset.language may be {', '.join(there[:12])}{' ...' if len(there) > 12 else ''}"
        if there
        else ("pip install django, which has catalogs in its wheel")
    )


def _pairs_in(file: Path, faults: Faults) -> list[Pair]:
    try:
        messages = _READERS[file.suffix](file)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        faults.report({str(file): f"not a catalog that can be read: {what}"})
        return []
    pairs = [Pair(tidied(source), tidied(target)) for source, target in messages.items()]
    return [pair for pair in pairs if pair.source and pair.target]
