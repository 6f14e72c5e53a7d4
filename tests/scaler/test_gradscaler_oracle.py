"""torch.amp.GradScaler is the oracle: same constants, same overflows, same decisions, same weights."""

from __future__ import annotations

import functools
import itertools

import torch

from mptrain.optimizer import SGD, Adagrad, Adam, AdamW
from mptrain.scaler import DynamicScaler
from tests.loops import each
from tests.scaler.arena import attempts, distance, train_as_the_engine_does, train_as_torch_does

PERIOD = 7
CONSTANTS = {"init_scale": 2.0**12, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": PERIOD}
RATE, DECAY = 2.0**-5, 2.0**-10  # both exact in FP32: torch computes with Python's double where we have a device float
RULES = {
    "sgd": (SGD(lr=RATE, momentum=0.0), torch.optim.SGD, {}),
    "sgd momentum": (SGD(lr=RATE, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "sgd nesterov decay": (
        SGD(lr=RATE, momentum=0.9, nesterov=True, weight_decay=DECAY),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": DECAY},
    ),
    "adam": (Adam(lr=RATE / 4, weight_decay=DECAY), torch.optim.Adam, {"weight_decay": DECAY}),
    "adamw": (AdamW(lr=RATE / 4), torch.optim.AdamW, {"weight_decay": 0.01}),
    "adagrad": (Adagrad(lr=RATE), torch.optim.Adagrad, {}),
    "adagrad decay": (Adagrad(lr=RATE, weight_decay=DECAY), torch.optim.Adagrad, {"weight_decay": DECAY}),
}
PATHS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False, "fused": False}}


def our_scaler(**constants):
    return DynamicScaler(**{**CONSTANTS, **constants}, min_scale=2.0**-60, max_scale=2.0**60)


def torch_scaler(**constants):
    return torch.amp.GradScaler("cpu", **{**CONSTANTS, **constants})


def optimizer_of(name, path, tower):
    """torch's optimizer with decay on matrices only, as ours does it unless told otherwise."""
    rule, kind, arguments = RULES[name]
    matrices = [p for p in tower.parameters() if p.ndim > 1]
    vectors = [p for p in tower.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return kind(groups, lr=rule.lr, **arguments, **PATHS[path])


@functools.cache
def course_of(clean_start):
    return attempts(["main"], clean_start=clean_start)


@functools.cache
def ours(name, accumulate=1, clip_norm=None, clean_start=True):
    make = {"main": (RULES[name][0], our_scaler())}
    return train_as_the_engine_does(course_of(clean_start), make, accumulate=accumulate, clip_norm=clip_norm)


def torchs(name, path, accumulate=1, clip_norm=None, clean_start=True):
    make = {"main": (functools.partial(optimizer_of, name, path), torch_scaler())}
    return train_as_torch_does(course_of(clean_start), make, accumulate=accumulate, clip_norm=clip_norm)


def assert_equal_decisions(one, other):
    assert one.overflows == other.overflows
    assert one.scales == other.scales


def assert_equal_bits(one, other):
    for step, (mine, theirs) in enumerate(zip(one.weights, other.weights, strict=True)):
        for key in mine:
            assert torch.equal(mine[key], theirs[key]), f"{key} differs at step {step}"


def test_the_course_walks_the_whole_period_and_overflows_in_every_way():
    course = course_of(True)
    outcome = ours("sgd momentum")
    (flags,) = outcome.overflows.values()
    (scales,) = outcome.scales.values()
    assert [bool(attempt.spoilt) for attempt in course] == flags
    assert len({way for attempt in course for way in map(str, attempt.spoilt.values())}) == 9
    grown = sum(after > before for before, after in itertools.pairwise(scales))
    assert grown >= 5
    assert max(scales) / min(scales) >= 8
    assert 15 <= sum(flags) <= 40


@each(("name", "accumulate"), [*((name, 1) for name in RULES), ("sgd momentum", 4), ("adam", 4)])
def test_without_clipping_weights_are_bit_equal_to_torchs_fused_path(name, accumulate):
    mine, theirs = ours(name, accumulate), torchs(name, "fused", accumulate)
    assert_equal_decisions(mine, theirs)
    assert_equal_bits(mine, theirs)


@each(("name", "path"), [*((name, "foreach") for name in RULES), ("sgd momentum", "plain"), ("adam", "plain")])
def test_without_clipping_weights_are_within_1e_6_of_torchs_other_paths(name, path):
    mine, theirs = ours(name), torchs(name, path)
    assert_equal_decisions(mine, theirs)
    assert distance(mine, theirs) <= 1e-6


@each(("name", "accumulate"), [*((name, 1) for name in RULES), ("sgd momentum", 4), ("adam", 4)])
def test_with_clipping_folded_into_the_unscale_weights_are_torchs_to_1e_6(name, accumulate):
    clip_norm = 0.25
    mine, theirs = ours(name, accumulate, clip_norm), torchs(name, "fused", accumulate, clip_norm)
    assert_equal_decisions(mine, theirs)
    assert distance(mine, theirs) <= 1e-6
    assert distance(mine, ours(name, accumulate)) > 1e-3  # it did clip


@each("name", ["sgd momentum", "adam", "adagrad"])
def test_trap_27_a_first_step_that_overflows_leaves_no_trace(name):
    """Against torch's plain path: its fused SGD would read a momentum buffer that nobody has written."""
    mine, theirs = ours(name, clean_start=False), torchs(name, "plain", clean_start=False)
    assert mine.overflows["main"][:3] == [True, True, True]
    assert_equal_decisions(mine, theirs)
    assert distance(mine, theirs) <= 1e-6


@each(("names", "clip_norm"), [(("sgd momentum", "adam"), None), (("adamw", "adagrad"), 0.25)])
def test_two_optimizers_with_a_scaler_each_overflow_independently(names, clip_norm):
    towers = dict(zip(("first", "second"), names, strict=True))
    course = attempts(list(towers), seed=5)
    mine = train_as_the_engine_does(
        course, {tower: (RULES[name][0], our_scaler()) for tower, name in towers.items()}, clip_norm=clip_norm
    )
    theirs = train_as_torch_does(
        course,
        {tower: (functools.partial(optimizer_of, name, "fused"), torch_scaler()) for tower, name in towers.items()},
        clip_norm=clip_norm,
    )
    assert mine.overflows["first"] != mine.overflows["second"]
    assert_equal_decisions(mine, theirs)
    if clip_norm is None:
        assert_equal_bits(mine, theirs)
    else:
        assert distance(mine, theirs) <= 1e-6


def test_constants_that_are_no_powers_of_two_give_the_same_decisions_and_bits():
    constants = {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3}
    course = course_of(True)
    mine = train_as_the_engine_does(course, {"main": (RULES["adam"][0], our_scaler(**constants))})
    make = {"main": (functools.partial(optimizer_of, "adam", "fused"), torch_scaler(**constants))}
    theirs = train_as_torch_does(course, make)
    assert_equal_decisions(mine, theirs)
    assert_equal_bits(mine, theirs)
