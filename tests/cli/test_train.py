"""The lines that a run prints before it trains."""

import pytest

from mptrain.cli.main import main


@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_a_cpu_without_half_arithmetic_is_described_once(tmp_path, monkeypatch, capsys, kernels):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mptrain.precision.support.has_native_half", lambda dtype: False)
    monkeypatch.setattr("mptrain.precision.support.upcasts", lambda policy, device: kernels == "auto")
    words = ["model=mlp", "precision=amp_bf16", "train.max_steps=1", "run.name=run", "device=cpu"]
    assert main([*words, f"precision.cpu_kernels={kernels}"]) == 0
    found = capsys.readouterr()
    said = " ".join((found.out + found.err).split())
    assert said.count("this CPU has no bfloat16 arithmetic") == 1
    assert found.err.startswith("warning: precision=amp_bf16 on cpu: ")
    assert ("no faster than FP32" in found.err) == (kernels == "auto")
    assert ("10 to 80 times slower" in found.err) == (kernels == "native")
