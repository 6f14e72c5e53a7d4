from __future__ import annotations

import pytest

from mptrain.integrations.watch import Watch


@pytest.fixture(autouse=True)
def no_watch_gives_up(monkeypatch, request):
    """Fail if observing failed in a test that does not plant it: the training goes on, and nobody would see it."""
    failed, give_up = [], Watch.give_up

    def noted(self, error):
        failed.append(error)
        give_up(self, error)

    monkeypatch.setattr(Watch, "give_up", noted)
    yield
    assert not failed or "that_fails" in request.node.name, failed
