"""Objects that commands print with ``--json``, as pydantic models around the values that the text is made of.

The JSON Schema of each, made from its types and docstrings, is a file in ``schemas/``. A new field keeps the version;
one that is gone, renamed or has another meaning raises it.
"""

from mptrain.cli.answers.answer import Answer, print_answer
from mptrain.cli.answers.examination import DiagnoseAnswer, DoctorAnswer, Model, RecommendAnswer
from mptrain.cli.answers.report import CompareAnswer, ReportAnswer
from mptrain.cli.answers.runs import EvalAnswer, RunsAnswer

__all__ = [
    "Answer",
    "CompareAnswer",
    "DiagnoseAnswer",
    "DoctorAnswer",
    "EvalAnswer",
    "Model",
    "RecommendAnswer",
    "ReportAnswer",
    "RunsAnswer",
    "print_answer",
]
