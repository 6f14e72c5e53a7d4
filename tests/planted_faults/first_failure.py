"""A plugin of pytest that keeps the first test that fails in the file that an environment variable names."""

from __future__ import annotations

import json
import os
from pathlib import Path

REPORT = "MPTRAIN_PLANTED_REPORT"


def pytest_runtest_logreport(report):
    if report.failed:
        _keep(report)


def pytest_collectreport(report):
    if report.failed:
        _keep(report)


def _keep(report):
    path, hung = Path(os.environ[REPORT]), "from pytest-timeout" in str(report.longrepr)
    if not path.exists():
        path.write_text(json.dumps({"test": report.nodeid, "hung": hung}), encoding="utf-8")
