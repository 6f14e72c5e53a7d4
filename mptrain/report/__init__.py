"""Reports of runs, sweeps and comparisons: one self-contained HTML page, and the same in Markdown.

Reads records only; never imports torch.
"""

from mptrain.report.writing import Written, write_report

__all__ = ["Written", "write_report"]
