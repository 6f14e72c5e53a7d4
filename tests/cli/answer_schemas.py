"""JSON Schemas of the objects that commands print with ``--json``: files of ``mptrain/cli/schemas/``.

They are made from the types and docstrings of `mptrain.cli.answer` and of ``answers`` of the shelves. After a change of these,
``python tests/cli/answer_schemas.py`` writes them anew; a change that is more than a new field raises the version.
"""

from __future__ import annotations

import inspect
import json
import re

from pydantic.json_schema import GenerateJsonSchema

from mptrain.cli.answer import EvalAnswer, RunsAnswer
from mptrain.cli.help import SCHEMAS
from mptrain.lab.answers import DiagnoseAnswer, DoctorAnswer, FormatsAnswer, RecommendAnswer
from mptrain.study.answers import CompareAnswer, ReportAnswer

ANSWERS = (
    RecommendAnswer,
    DiagnoseAnswer,
    DoctorAnswer,
    FormatsAnswer,
    ReportAnswer,
    CompareAnswer,
    EvalAnswer,
    RunsAnswer,
)

NONFINITE = {
    "description": "Numbers that are not finite, which are null in their place: path, joined by dots, to kind.",
    "type": "object",
    "additionalProperties": {"enum": ["inf", "-inf", "nan"]},
}


class Generator(GenerateJsonSchema):
    """Schemas in which any number may be null, because it is not finite, and fields have the text of their docstring."""

    def field_title_should_be_set(self, schema):
        return False

    def float_schema(self, schema):
        return {"anyOf": [super().float_schema(schema), {"type": "null"}]}

    def model_schema(self, schema):
        return described(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema):
        return described(super().dataclass_schema(schema), schema["cls"])


def described(schema, cls):
    """Add the docstring of a class and of its attributes, and require all fields, since all are printed."""
    schema["description"] = re.sub(r"\s+", " ", inspect.getdoc(cls).partition("\n\nAttributes:\n")[0])
    for base in reversed(cls.__mro__):  # a class that adds fields to another describes these alone
        attributes = inspect.cleandoc(base.__doc__ or "").partition("\n\nAttributes:\n")[2]
        for name, words in re.findall(r"^    (\w+): (.*(?:\n        .*)*)", attributes, re.MULTILINE):
            if name in schema["properties"]:
                schema["properties"][name]["description"] = re.sub(r"\s+", " ", words)
    schema["required"] = list(schema["properties"])
    return schema


def schema_of(answer):
    """Return the JSON Schema of an object."""
    made = answer.model_json_schema(mode="serialization", schema_generator=Generator)
    definitions = made.pop("$defs", {})
    named = {"schema": {"const": answer.SCHEMA}, **made.pop("properties"), "nonfinite": NONFINITE}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": answer.SCHEMA}
    required = ["schema", *made.pop("required")]
    return {**head, **made, "title": answer.SCHEMA, "properties": named, "required": required, "$defs": definitions}


def files():
    """Return the text of each file by its path."""
    return {
        SCHEMAS
        / f"{one.SCHEMA.removeprefix('mptrain.').split('/')[0]}.json": f"{json.dumps(schema_of(one), indent=1)}\n"
        for one in ANSWERS
    }


if __name__ == "__main__":
    SCHEMAS.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
