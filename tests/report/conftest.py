"""Figures that are painted and not made into SVG, which takes most of the time of a page."""

from __future__ import annotations

import pytest

from mptrain.report import plotting


@pytest.fixture
def drawn():
    """Asks for figures as SVG where a module leaves them out."""


@pytest.fixture
def undrawn(request, monkeypatch):
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(plotting.Figure, "savefig", lambda *_, **__: None)
        monkeypatch.setattr(plotting, "_tidied", lambda *_: "<svg/>")
