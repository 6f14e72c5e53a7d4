"""Reports of runs, sweeps and comparisons: one self-contained HTML page and the same content in Markdown.

A page consists of sections of blocks: paragraphs, tables, figures; a terminal shows them too. ``name`` of a figure is
its file name and the prefix of its ids: letters, digits and hyphens. Reports are made from records alone. This package
must not import torch, and importing it does not import matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mptrain.report.forecast_page import Recommendation, recommend
    from mptrain.report.report_files import ReportFiles, write_forecast, write_replay, write_report

__all__ = ["Recommendation", "ReportFiles", "recommend", "write_forecast", "write_replay", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mptrain.report import forecast_page, report_files

    return getattr(report_files if hasattr(report_files, name) else forecast_page, name)
