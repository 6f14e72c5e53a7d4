"""On a CUDA device the backward pass runs on a thread of autograd's own; modules and custom functions are found there too."""

from __future__ import annotations

import pytest
import torch

from mptrain.config.compose import compose
from mptrain.lab.diagnosis.diagnose import diagnose_config
from tests.planted import ALLOWED, plant

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="pytest -m gpu, on a GPU")]


@pytest.mark.parametrize(("kind", "module"), [("backward", "body.2"), ("forward", "body.1"), ("square", None)])
def test_a_fault_in_a_module_or_a_custom_function_is_found(tmp_path, monkeypatch, kind, module):
    plant(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("device=cuda", "model=planted", f"model.kind={kind}", "precision=fp16_static", "scaler.scale=131072")
    words += ("dataset.train_samples=64", "train.batch_size=16")
    found = diagnose_config(compose([ALLOWED[2], *words], config_dirs=[ALLOWED[1]])).examination
    if kind == "square":
        assert found.notes[0].startswith("SquareBackward in last.0 (Calls) returns a gradient in float32")
    else:
        assert (found.cause, found.module) == (kind, module)
        assert found.remedies[-1].helped
