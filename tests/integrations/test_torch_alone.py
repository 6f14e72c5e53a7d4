"""A watch needs nothing that torch does not bring."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.small_runs import environment

PROGRAM = """
import sys

for name in (
    "annotated_types hydra matplotlib omegaconf pydantic pydantic_core rich scipy sklearn torchvision yaml PIL pandas jinja2"
).split():
    sys.modules[name] = None
import torch, mptrain
assert "mptrain.integrations" not in sys.modules  # nothing is imported before it is used
model = torch.nn.Linear(2, 2)
optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
with mptrain.watch(model, optimizer, scaler, every=2, dir=sys.argv[1]) as watch:
    for _ in range(4):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
print(watch.last["step"])
for name in ("doctor", "diagnose", "recommend"):
    try:
        getattr(mptrain, name)
    except ImportError as error:
        assert str(error).startswith(f"mptrain.{name} needs "), error
        assert str(error).endswith("install mptrain with its dependencies (pip install -e . in its folder)"), error
    else:
        raise AssertionError(name)
"""


@pytest.mark.process
def test_a_loop_is_watched_with_torch_alone(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("4\n", 0), done.stderr
    assert len((tmp_path / "run" / "histograms.jsonl").read_text().splitlines()) == 3
