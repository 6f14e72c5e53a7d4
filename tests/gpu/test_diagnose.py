"""On a CUDA device the backward pass runs on a thread of autograd's own; modules and custom functions are found there too."""

from __future__ import annotations

import pytest
import torch
from planted import ALLOWED, plant

from mptrain.config.compose import compose
from mptrain.inspection.diagnosis import diagnose_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def look(tmp_path, monkeypatch):
    plant(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def at(kind):
        words = ("device=cuda", "model=planted", f"model.kind={kind}", "precision=fp16_static", "scaler.scale=131072")
        config = compose(
            [ALLOWED[2], *words, "dataset.train_samples=64", "train.batch_size=16"], config_dirs=[ALLOWED[1]]
        )
        return diagnose_config(config).found

    return at


def test_an_overflow_in_one_convolutions_backward_is_found(look):
    found = look("backward")
    assert (found.cause, found.module, found.operator) == ("backward", "body.2", "convolution_backward")
    assert found.remedies[-1].helped


def test_an_overflow_in_one_convolutions_forward_is_found(look):
    found = look("forward")
    assert (found.cause, found.module) == ("forward", "body.1")
    assert found.remedies[-1].helped


def test_a_custom_function_in_the_wrong_dtype_is_named(look):
    assert look("square").notes[0].startswith("SquareBackward in last.0 (Calls) returns a gradient in float32")
