"""Base of the objects that commands print with ``--json``, and their printing."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from mptrain.cli.messages import writing
from mptrain.system.masking import masked
from mptrain.system.records import as_json


class Data(BaseModel):
    """Part of an object that a command prints with ``--json``."""

    model_config = ConfigDict(from_attributes=True, frozen=True)

    @classmethod
    def of(cls, source: object, **known: Any) -> Self:
        """Return the data with the values given, and all others from the attributes of that name of an object."""
        names = cls.model_fields.keys() - known.keys()
        return cls.model_validate({**{name: getattr(source, name) for name in names}, **known})


class Answer(Data):
    """Object that a command prints with ``--json``; ``SCHEMA`` is its name and version, its field ``schema``."""

    SCHEMA: ClassVar[str]


def print_answer(answer: Answer) -> None:
    """Print an object on standard output as one line of strict JSON, without secrets.

    Raises:
        StorageError: Standard output cannot be written.
    """
    with writing():
        print(as_json({"schema": answer.SCHEMA, **_decodable(masked(answer.model_dump()))}), flush=True)


def _decodable(value: Any) -> Any:
    """Return a value whose texts have escapes in place of lone surrogates (undecodable bytes), which JSON lacks."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_decodable(key): _decodable(item) for key, item in value.items()}
    return [_decodable(item) for item in value] if isinstance(value, (list, tuple)) else value
