"""A loop run alone and watched, with equal weights at the end, and what the watch has recorded."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import mptrain
from mptrain.system.records import EventRecord


def model_of(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def loss_of(model):
    return nn.functional.cross_entropy(model(torch.randn(16, 6)), torch.randint(3, (16,)))


def norm_of(parameters):
    return nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]).item()


def both(loop, **watched):
    """Run a loop alone and watched, require equal weights, and return what was recorded."""
    seen = []
    weights = []
    for on in (False, True):
        model = model_of()
        weights.append([model, loop(model, seen if on else None, watched if on else None)])
    pairs = zip(weights[0][0].parameters(), weights[1][0].parameters(), strict=True)
    assert all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in pairs)
    return seen, weights[1][1]


@contextlib.contextmanager
def watching(seen, watched, model, optimizer, scaler=None):
    if watched is None:
        yield
        return
    with mptrain.watch(model, optimizer, scaler, **{"every": 0, **watched}) as watch:
        watch.on_event(seen.append)
        yield


def kinds(seen):
    return [one.kind for one in seen if isinstance(one, EventRecord)]


def of_kind(seen, kind):
    return [one for one in seen if isinstance(one, EventRecord) and one.kind == kind]


class Scaler:
    """Loss scaler of a loop's own; as timm's, with one of torch inside, if it is given one."""

    def __init__(self, inner=None):
        self.value = 1024.0
        if inner is not None:
            self._scaler = inner


def report_of(folder):
    from mptrain.report.run_page import run_page
    from mptrain.runlog.run_paths import RunPaths

    return run_page(RunPaths(folder)).lead
