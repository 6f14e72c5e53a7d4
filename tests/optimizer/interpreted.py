"""Triton's interpreter for the tests of a module, and what the kernels are compared with."""

from __future__ import annotations

import importlib
import sys

import numpy
import pytest
import torch

from mptrain.optimizer import multi_tensor

KERNELS = "mptrain.optimizer.triton_kernels"


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    """Kernels made for the interpreter, whether or not Triton itself was imported for it before."""
    language = importlib.import_module("triton.language")
    made_for_devices = sys.modules.pop(KERNELS, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        add = language.standard._sum_combine
        patch.setattr(language, "sum", lambda values, axis: language.reduce(values, axis, add))
        handle = importlib.import_module("triton.runtime.interpreter").TensorHandle
        patch.setattr(handle, "set_attr", _assert_promise)
        multi_tensor.obstacle.cache_clear()
        importlib.import_module(KERNELS)
        yield
    multi_tensor.obstacle.cache_clear()
    del sys.modules[KERNELS]
    if made_for_devices is not None:
        sys.modules[KERNELS] = made_for_devices


def _assert_promise(handle, key, value):
    """The interpreter notes how addresses are aligned and never looks; a device would fail where it is not so."""
    assert key == "tt.divisibility"
    assert (handle.data % numpy.uint64(value[0]) == 0).all()


@pytest.fixture(autouse=True)
def overflow_is_no_warning():
    with numpy.errstate(all="ignore"):
        yield


def rounded(master, dtype):
    """What `MasterWeights.copy_to_params` makes of a master."""
    half = master.to(dtype)
    return half.clamp(-65504, 65504) if dtype == torch.float16 else half
