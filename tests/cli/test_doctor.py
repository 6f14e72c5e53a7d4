import importlib

import pytest

from mptrain.cli import doctor as module
from mptrain.precision.support import Support


def test_the_environment_the_devices_and_every_mode_are_shown(terminal):
    assert terminal("doctor") == 0
    for word in (
        "torch ",
        "torchvision ",
        "hydra ",
        "omegaconf ",
        "memory ",
        "disk ",
        "arithmetic: FP16 ",
        "BF16 ",
    ):
        assert word in terminal.out
    for mode in ("fp32", "tf32", "bf16", "amp_dynamic", "fp16_static", "fp16_pure"):
        assert mode in terminal.out
    assert "unsupported" in terminal.out
    assert "a CPU has no TF32" in terminal.out
    assert all(letter.isprintable() or letter == "\n" for letter in terminal.out)


def test_a_torchvision_for_another_torch_is_recognised(terminal, monkeypatch):
    real = importlib.import_module

    def broken(name, *rest):
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name, *rest)

    monkeypatch.setattr(module.importlib, "import_module", broken)
    assert terminal("doctor") == 3
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
def test_something_missing_or_broken_ends_with_3_and_how_to_mend_it(terminal, monkeypatch, name, error, mend):
    real = importlib.import_module

    def broken(asked, *rest):
        if asked == name:
            raise error
        return real(asked, *rest)

    monkeypatch.setattr(module.importlib, "import_module", broken)
    if name == "sklearn":
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda asked: None)
    assert terminal("doctor") == 3
    assert f"broken: {name}: " in terminal.out
    assert mend in terminal.out


def test_a_mode_suits_runs_slower_or_is_refused():
    assert module.verdict(Support(True, "native")) == "supported"
    assert module.verdict(Support(True, "upcast", "no faster")) == "supported, slower"
    assert module.verdict(Support(False, "no", "use fp32")) == "unsupported"
