import importlib
import sys

import pytest

from mptrain.lab.commands import doctor as module
from mptrain.precision.support import Support


def test_the_environment_the_devices_and_every_mode_are_shown(terminal):
    assert terminal("doctor") == 0
    for word in ("torch ", "torchvision ", "hydra ", "omegaconf ", "memory ", "disk ", "arithmetic: FP16 ", "BF16 "):
        assert word in terminal.out
    for mode in ("fp32", "tf32", "bf16", "amp_dynamic", "fp16_static", "fp16_pure"):
        assert mode in terminal.out
    assert "unsupported" in terminal.out
    assert "a CPU has no TF32" in terminal.out
    assert all(letter.isprintable() or letter == "\n" for letter in terminal.out)


@pytest.fixture
def doctor_without(terminal, monkeypatch):
    """Run `mptrain doctor` where the import of a package raises an error."""
    real = importlib.import_module

    def run(broken, error):
        def import_module(name, *rest):
            if name == broken:
                raise error
            return real(name, *rest)

        monkeypatch.setattr(module.importlib, "import_module", import_module)
        return terminal("doctor")

    return run


def test_a_torchvision_for_another_torch_is_recognised(terminal, doctor_without, monkeypatch):
    monkeypatch.setattr(module.sys, "version_info", (3, 14, 0))
    assert doctor_without("torchvision", RuntimeError("operator torchvision::nms does not exist")) == 3
    assert f"({sys.executable}); untested" in terminal.out
    assert "was not built for torch" in terminal.out
    assert "--force-reinstall torch torchvision" in terminal.out


@pytest.mark.parametrize(
    ("name", "error", "mend"),
    [
        ("sklearn", ModuleNotFoundError("No module named 'sklearn'"), "pip install scikit-learn"),
        ("torch", OSError("libx"), "reinstall torch"),
        ("omegaconf", ModuleNotFoundError("No module named 'omegaconf'"), "pip install omegaconf"),
    ],
)
def test_something_broken_ends_with_3_and_how_to_mend_it(terminal, doctor_without, monkeypatch, name, error, mend):
    if name == "sklearn":
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda asked: None)
    assert doctor_without(name, error) == 3
    assert f"broken: {name}: " in terminal.out
    assert mend in terminal.out


def test_a_mode_suits_runs_slower_or_is_refused():
    assert module.verdict(Support(True, "native")) == "supported"
    assert module.verdict(Support(True, "upcast", "no faster")) == "supported, slower"
    assert module.verdict(Support(False, "no", "use fp32")) == "unsupported"
