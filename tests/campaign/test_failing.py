"""What a run that ended tells its user to type."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mptrain.campaign.failing import in_the_users_terms
from mptrain.config.compose import compose
from mptrain.distributed.ranks import ALONE
from mptrain.errors import Preempted

DIRECTORY = SimpleNamespace(root="outputs/r")
TRUST = "extensions.allow=[theirs.*]"


def hint_of(error, words=(), count=1, here=1):
    ranks = SimpleNamespace(count=count, here=here) if count > 1 else ALONE
    shown = in_the_users_terms(error, compose([*words]), DIRECTORY, ranks)
    assert isinstance(shown, Preempted)
    return shown.hint


@pytest.mark.parametrize(
    "error", [Preempted("SIGTERM", "continue with: mptrain resume outputs/r", 75), KeyboardInterrupt()]
)
@pytest.mark.parametrize(
    ("words", "count", "here", "expected"),
    [
        ((), 1, 1, "mptrain resume outputs/r"),
        (("distributed.procs=2",), 2, 2, "mptrain resume outputs/r"),
        ((), 2, 2, "torchrun --nproc-per-node=2 -m mptrain resume outputs/r"),
        ((), 8, 4, "torchrun --nproc-per-node=4 --nnodes=2 ... -m mptrain resume outputs/r"),
        ((TRUST,), 2, 2, f"torchrun --nproc-per-node=2 -m mptrain resume outputs/r '{TRUST}'"),
    ],
)
def test_a_run_is_gone_on_with_as_it_was_begun(error, words, count, here, expected):
    assert hint_of(error, words, count, here) == f"continue with: {expected}"
