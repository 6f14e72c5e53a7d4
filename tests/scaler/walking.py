"""Presets as a command line gives them, and the scales that they go through."""

from __future__ import annotations

import functools
import math

import torch

from mptrain.config.compose import compose
from mptrain.numerics.overflow_check import judge

CPU = torch.device("cpu")

#: The first scale of each preset.
STARTS = {
    "torch": 2.0**16,
    "apex": 2.0**16,
    "deepspeed": 2.0**16,
    "megatron": 2.0**32,
    "fairseq": 2.0**7,
    "colossalai": 2.0**16,
    "keras": 2.0**15,
    "mxnet": 2.0**16,
    "nnabla": 2.0**3,
    "flax": 2.0**16,
    "paddle": 2.0**15,
}
PRESETS = list(STARTS)

#: The first scale of each published rule that is no dynamic one.
OTHER_STARTS = {"als": 1.0, "logmax": 1.0, "smooth": 1.0}
ALL_STARTS = {**STARTS, **OTHER_STARTS}
ALL = list(ALL_STARTS)

#: What a rule calls the steps until something happens; logmax knows none.
WINDOWS = {**dict.fromkeys(STARTS, "growth_interval"), "als": "update_period", "smooth": "interval"}


def verdict_of(overflow: bool, measured: float = 0.25, scale: float = 1.0):
    """What a step said, the measurement of the scaled gradients included."""
    norm = torch.tensor([math.inf if overflow else 1.0], dtype=torch.float64)
    return judge(
        norm, torch.tensor([scale]), skip_on_overflow=True, measured=torch.tensor([measured], dtype=torch.float64)
    )


VERDICTS = {False: verdict_of(False), True: verdict_of(True)}


@functools.cache
def preset(name: str, **constants):
    """The scaler of configs/scaler/NAME.yaml, with some constants written on the command line."""
    words = [f"scaler.{key}={'null' if value is None else value!r}" for key, value in constants.items()]
    return compose([f"scaler={name}", *words]).scaler.build()


def with_window(name: str, window: int, **constants):
    """A preset whose window, if it has one, is so many steps."""
    return preset(name, **({WINDOWS[name]: window} if name in WINDOWS else {}), **constants)


def steps(trace: str) -> list[bool]:
    return [step == "x" for step in trace]


def walk(scaler, overflows) -> list[float]:
    """The scale after each step."""
    state, scales = scaler.initial(CPU), []
    for overflow in overflows:
        state = scaler.after(state, VERDICTS[overflow])
        scales.append(state["scale"].item())
    return scales
