"""Tokenizers of the library transformers: token numbers of texts and back, and their content for ``data.json``.

Only those of the library tokenizers are taken, whose two files say everything. Code of repositories is never run.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mptrain.system.errors import DataError
from mptrain.system.files import expanded
from mptrain.workloads.text.transformers_models import load_library

#: Files that are a whole tokenizer.
FILES = ("tokenizer.json", "tokenizer_config.json")

_HINT = "name a folder that save_pretrained has written, or a repository in the cache; dataset.download=true downloads"


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of transformers; ``len()`` is the number of its tokens, with those that were added to it.

    Running text and prompts get no token that is not in them: windows begin anywhere in the text, so a network does not
    learn what a token for the beginning means. A text to classify has the tokens that the tokenizer adds, such as
    ``[CLS]``, because pretrained classifiers read their answer there.

    Attributes:
        name: Folder or repository, as the configuration has it.
        files: Content of `FILES` by name, as the library writes them.
        digest: SHA-256 (hexadecimal) of what determines its answers: two folders with the same tokenizer agree.
    """

    name: str
    files: Mapping[str, str] = field(repr=False, compare=False)
    digest: str
    _loaded: Any = field(repr=False, compare=False)

    def __len__(self) -> int:
        return len(self._loaded)

    @classmethod
    def of(cls, name: str, *, download: bool = False) -> Tokenizer:
        """Read a tokenizer from a folder, or else from the cache of the Hugging Face hub, or download it if allowed.

        Raises:
            EnvironmentRefused: transformers is not installed.
            DataError: It is missing, and must not or cannot be downloaded, the library cannot read it, or it is none of
                the library tokenizers.
        """
        source = str(expanded(name)) if expanded(name).is_dir() else name
        try:
            return cls._read(name, source, here=True)
        except DataError:
            if not download or Path(source).is_dir():
                raise
        return cls._read(name, name, here=False)

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Tokenizer:
        """Return the tokenizer in ``data.json``, whose own folder may be gone.

        Raise KeyError, TypeError or ValueError if it is damaged, or the library now reads another one from its files.
        """
        given = card["tokenizer"]
        with tempfile.TemporaryDirectory() as folder:
            for file in FILES:
                (Path(folder) / file).write_text(given["files"][file], encoding="utf-8")
            loaded = cls._read(str(given["name"]), folder, here=True)
        if [loaded.digest, *loaded.labels()] != [given["digest"], *card["labels"][-1:]]:
            raise ValueError(f"its tokenizer {loaded.name} is not that of the training, or is read otherwise now")
        return loaded

    @classmethod
    def _read(cls, name: str, source: str, *, here: bool) -> Tokenizer:
        library = load_library("dataset.tokenizer")
        try:
            loaded = library.AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=here)
            if not loaded.is_fast:
                raise TypeError(f"{type(loaded).__name__} is none of the library tokenizers, with a tokenizer.json")
        except Exception as error:  # each tokenizer has errors of its own
            missing = "is no folder, and not in the cache of the Hugging Face hub" if here else "cannot be downloaded"
            why = "cannot be read" if Path(source).is_dir() else missing
            message = " ".join(str(error).split())[:200]
            raise DataError(f"dataset.tokenizer={name} {why}: {type(error).__name__}: {message}", _HINT) from error
        numbers = [loaded.pad_token_id, loaded.unk_token_id, loaded.bos_token_id, loaded.eos_token_id]
        more = [type(loaded).__name__, numbers, getattr(loaded, "clean_up_tokenization_spaces", None)]
        whole = json.dumps([*more, json.loads(loaded.backend_tokenizer.to_str())], sort_keys=True)
        with tempfile.TemporaryDirectory() as folder:
            loaded.save_pretrained(folder)
            files = {file: (Path(folder) / file).read_text(encoding="utf-8") for file in FILES}
        return cls(name, files, hashlib.sha256(whole.encode()).hexdigest(), loaded)

    @property
    def unknown(self) -> int | None:
        """Number of the token for what it does not know; None if there is none, or it is also the end of a text."""
        number: int | None = self._loaded.unk_token_id
        return None if number == self._loaded.eos_token_id else number

    @property
    def padding(self) -> int | None:
        """Number of the token that pads texts: its own, or else the end of a text, as is usual for GPT-2; or None."""
        own: int | None = self._loaded.pad_token_id
        return self._loaded.eos_token_id if own is None else own

    def numbers(self, text: str) -> Tensor:
        """Return the token numbers of running text, int32 ``[L]``."""
        numbers = self._loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(numbers, dtype=torch.int32)

    def first_numbers(self, text: str, most: int) -> Tensor:
        """Return the token numbers of a text to classify with those that are added, int64 ``[T]``, cut to ``most``."""
        # The library does not cut a text to fewer tokens than it adds.
        return torch.tensor(self._loaded(text, truncation=True, max_length=most)["input_ids"][:most]).long()

    def text(self, numbers: list[int]) -> str:
        """Return the text of token numbers, as the library decodes them."""
        return str(self._loaded.decode(numbers))

    __call__ = text

    def labels(self) -> list[str]:
        """Return the line that stands for its tokens among the labels of a run, which must have the same."""
        return [f"tokenizer {self.digest}"]

    def card(self) -> dict[str, Any]:
        """Return its part of ``data.json``: with it predictions need no folder, and exported weights have it beside."""
        tokenizer = {"name": self.name, "digest": self.digest, "files": dict(self.files)}
        return {"labels": self.labels(), "tokenizer": tokenizer}
