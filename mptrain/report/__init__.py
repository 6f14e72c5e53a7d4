"""Reports of runs, sweeps and comparisons: one self-contained HTML page and the same content in Markdown.

A page consists of sections of blocks: paragraphs, tables, figures. ``name`` of a figure is its file name and the prefix
of its ids: letters, digits and hyphens. Reports are made from records alone. This package must not import torch.
"""

from mptrain.report.forecast_page import Recommendation, recommend
from mptrain.report.write_report import ReportFiles, write_forecast, write_replay, write_report

__all__ = ["Recommendation", "ReportFiles", "recommend", "write_forecast", "write_replay", "write_report"]
