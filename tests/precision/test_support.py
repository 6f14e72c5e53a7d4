from __future__ import annotations

import pytest
import torch

from mptrain.precision.support import cuda_support, require_support, resolve_device, supports
from mptrain.system.errors import EnvironmentRefused
from tests.loops import each
from tests.precision.modes import NAMES, mode

CPU = torch.device("cpu")
FP16 = {"amp_dynamic", "amp_static", "fp16_dynamic", "fp16_static", "fp16_noscale", "fp16_pure"}
#: Modes that need FP32 alone.
FP32 = {"fp32", "fp8_current_emulated", "mxfp8_emulated", "nvfp4_emulated"}


@each(
    ("capability", "able"),
    [
        ((6, 0), FP32 | FP16),
        ((6, 1), FP32 | FP16),
        ((7, 0), FP32 | FP16),
        ((7, 5), FP32 | FP16),
        ((8, 0), set(NAMES)),
        ((8, 6), set(NAMES)),
        ((9, 0), set(NAMES)),
        ((10, 0), set(NAMES)),
    ],
)
def test_what_each_generation_of_devices_can_do(capability, able):
    assert {name for name in NAMES if cuda_support(mode(name), capability).ok} == able
    for name in NAMES:
        support = cuda_support(mode(name), capability)
        assert f"compute capability {capability[0]}.{capability[1]}" in support.reason
        advised = support.advice.removeprefix("use precision=").split(" or ")[0]
        assert support.ok or cuda_support(mode(advised), capability).ok


def test_fp16_without_tensor_cores_is_said_to_save_memory_alone(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr("mptrain.precision.support.built_for", lambda: ())
    for capability, name, there in (
        ((6, 1), "NVIDIA GeForce GTX 1080 Ti", False),
        ((7, 0), "Tesla V100-SXM2-16GB", True),
        ((7, 5), "Tesla T4", True),
        ((7, 5), "Quadro RTX 5000", True),
        ((7, 5), "NVIDIA GeForce GTX 1660 SUPER", False),
        ((7, 5), "NVIDIA GeForce MX450", False),
        ((7, 5), "NVIDIA T600 Laptop GPU", False),
        ((8, 9), "NVIDIA L4", True),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, level=capability: level)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        support = require_support(mode("fp16_dynamic"), device)
        assert support.ok
        assert (support.advice == "") == there, name
        assert ("saves memory" in support.advice) != there
        assert require_support(mode("fp32"), device).advice == ""


def test_bf16_on_a_turing_card_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    device = torch.device("cuda", 0)
    with pytest.raises(EnvironmentRefused) as refusal:
        require_support(mode("bf16"), device)
    assert str(refusal.value) == (
        "precision=bf16 on cuda:0: compute capability 7.5 has no BF16 arithmetic (requires 8.0 or later: A100, A10, RTX "
        "30xx, L4, H100 and later)"
    )
    assert refusal.value.hint == "use precision=amp_dynamic, or set precision.force=true to run anyway"
    assert refusal.value.exit_code == 3
    forced = require_support(mode("bf16", force=True), device)
    assert not forced.ok


def test_a_cpu_has_no_tf32():
    with pytest.raises(EnvironmentRefused, match="a CPU has no TF32"):
        require_support(mode("tf32"), CPU)
    assert require_support(mode("tf32", force=True), CPU).advice == "use precision=fp32"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tf32"])
def test_a_cpu_runs_every_other_mode_and_says_how(name, monkeypatch):
    monkeypatch.setattr("mptrain.precision.upcast.has_native_half", lambda dtype: False)
    monkeypatch.setattr("mptrain.precision.support.has_native_half", lambda dtype: False)
    policy = mode(name)
    support = supports(policy, CPU)
    assert support.ok
    assert ("compute in FP32 and round once" in support.reason) == policy.half
    if policy.half:
        native = supports(mode(name, cpu_kernels="native"), CPU)
        assert native.ok
        assert "precision.cpu_kernels=native" in native.reason
        assert "cpu_kernels=auto" in native.advice


def test_a_cpu_with_half_arithmetic_says_so(monkeypatch):
    monkeypatch.setattr("mptrain.precision.upcast.has_native_half", lambda dtype: True)
    monkeypatch.setattr("mptrain.precision.support.has_native_half", lambda dtype: True)
    assert supports(mode("fp16_dynamic"), CPU).reason == (
        "float16 is native; gradients of convolutions, and LSTM layers, compute in FP32 and round once"
    )
    assert supports(mode("fp16_dynamic", cpu_kernels="native"), CPU).reason == "float16 is native"
    widened = supports(mode("fp16_dynamic", cpu_kernels="upcast"), CPU).reason
    assert widened == "precision.cpu_kernels=upcast; products compute in FP32 and round once to float16"


def test_devices_resolve_by_name(monkeypatch):
    assert resolve_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(EnvironmentRefused, match="device=cuda: torch sees no CUDA device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(EnvironmentRefused, match="device=cuda:2: there are 2 CUDA devices"):
        resolve_device("cuda:2")
