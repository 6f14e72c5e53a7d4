"""The kernels for devices that are not here: compiled and launched through a driver that is none.

The expected numbers are counts of instructions for one thread. Each kernel has its body twice: for whole blocks of aligned
tensors, and element by element under a mask.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mptrain.optimizer import SGD, Adagrad, Adam, AdamW
from mptrain.optimizer.multi_tensor import NORM_BLOCK, NORM_ROUNDS, UPDATE_BLOCK, MultiTensorNorms, MultiTensorUpdate
from mptrain.optimizer.rules import UpdateInputs

triton = pytest.importorskip("triton")

KERNELS = "mptrain.optimizer.triton_kernels"
CAPABILITIES = (75, 80, 90, 100)
ELEMENTS = UPDATE_BLOCK // 128  # of a thread
BODIES = 2
RULES = {
    "sgd": SGD(momentum=0.0),
    "sgd momentum": SGD(momentum=0.9),
    "sgd nesterov": SGD(momentum=0.9, nesterov=True),
    "adam": Adam(),
    "adamw": AdamW(),
    "adagrad": Adagrad(),
}
#: Tensors of FP32 that the rule reads and writes: the weight and its state.
WIDE = {"sgd": 1, "sgd momentum": 2, "sgd nesterov": 2, "adam": 3, "adamw": 3, "adagrad": 2}
#: Bytes that a thread may spill: Triton 3.6, which comes with torch 2.11, spills one number of Adam's on 10.0.
SPILLED = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else 8
HALVES = 2  # FP16 and BF16, each with code of its own for gradients and for rounded weights


class Driver:
    """A driver of a device that is not there: Triton compiles for it, and launches are counted.

    Args:
        capability: Of the device; also its number, so that each has kernels of its own.
    """

    def __init__(self, capability):
        self.capability, self.launches, self.utils = capability, 0, self

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", self.capability, 32)

    def get_device_properties(self, device):
        return {"max_shared_mem": 48 * 1024}

    def load_binary(self, name, kernel, shared, device):
        return None, None, 0, 0, 1024  # module, function, registers, spills, threads of a block

    def launcher_cls(self, source, metadata):
        return self.launch

    def launch(self, *args):
        self.launches += 1


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """The kernels as for a device, whether or not this process has them for the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    return importlib.import_module(KERNELS)


@pytest.fixture
def driver(kernels, monkeypatch):
    """Takes the place of Triton's driver, by capability."""
    config = importlib.import_module("triton.runtime.driver").driver

    def use(capability):
        monkeypatch.setattr(config, "_active", Driver(capability))
        return config._active

    return use


def compiled(kernel, capability):
    """The variants of a kernel that were launched on a device."""
    return list(kernel.device_caches[capability][0].values())


def stride(offset=0):
    """Values that begin on 16 bytes, or ``offset`` elements behind."""
    return UpdateInputs(*torch.ones(16)[offset : offset + 4].split(1))


def train(rule, decay, sizes=(UPDATE_BLOCK,), steps=1, offset=0):
    """Norms and updates of tensors of some sizes, in either precision, as a run launches them."""
    weights = [torch.zeros(size) for size in sizes]
    state = [rule.state(weight) for weight in weights]
    states = {name: [own[name] for own in state] for name in state[0]}
    halves = [(None, torch.float16, torch.bfloat16)[index % 3] for index in range(len(sizes))]
    publish = [
        None if half is None else torch.zeros(size, dtype=half) for half, size in zip(halves, sizes, strict=True)
    ]
    norms, update = MultiTensorNorms(weights), MultiTensorUpdate(rule, weights, states, [decay] * len(sizes), publish)
    for step in range(steps):
        memory = [torch.zeros(size + 8, dtype=half or torch.float32) for half, size in zip(halves, sizes, strict=True)]
        grads = [room[step % 8 :][: len(room) - 8] for room in memory]
        norms(grads)
        update(grads, stride(offset))


def resources(kernel, tmp_path):
    """Return the resources that ptxas gave a kernel, by NVIDIA's own tool: registers, and bytes of stack and of local memory."""
    tools = Path(importlib.import_module("triton.backends.nvidia").__file__).parent / "bin"
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    said = subprocess.run(
        [tools / "cuobjdump", "-res-usage", binary], check=True, capture_output=True, text=True
    ).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}


def count(code, instruction):
    """Count an instruction in the code; those on two numbers at once (f32x2) count twice."""
    return len(re.findall(rf"\b{instruction}(?!x2)\b", code)) + 2 * len(re.findall(rf"\b{instruction}x2\b", code))


def assert_sound(kernel, tmp_path):
    """Nothing spills, nothing flushes subnormals, and no product is left to be fused with a sum by ptxas."""
    code = kernel.asm["ptx"]
    used = resources(kernel, tmp_path)
    assert used["STACK"] <= SPILLED, used
    assert used["LOCAL"] == 0, used
    assert ".local" not in code
    assert ".ftz" not in code.replace("abs.ftz.f32", "")  # inside of exp2 in FP64, of the upper half of its argument
    assert not re.findall(r"\b(?:mul|add|sub)\.f(?:32|64|32x2)\b", code)  # without .rn they may be fused
    assert not re.findall(r"\.approx|div\.full", code)
    return used["REG"]


def usual(name, capability):
    """Every rule for one device, and two for the oldest and the newest, in the default tests; the rest with the slow ones."""
    ends = name in ("sgd momentum", "adamw") and capability in (75, 100)
    return pytest.param(name, capability, marks=() if capability == 90 or ends else pytest.mark.slow)


#: Numbers of elements of the tensors of a run.
SIZES = ((1,), (3, 0, 5), (UPDATE_BLOCK,) * 16, (1, 17, UPDATE_BLOCK, UPDATE_BLOCK + 1) * 8)


@pytest.mark.parametrize(("name", "capability"), [usual(name, cc) for cc in CAPABILITIES for name in RULES])
def test_kernels_are_compiled_once_move_16_bytes_fuse_what_is_meant_and_spill_nothing(
    name, capability, kernels, driver, tmp_path, record_property
):
    """Whatever moves: numbers of tensors, their sizes, where gradients begin, where scale, rate and verdict lie."""
    here = driver(capability)
    for decay in (0.0, 0.01):
        for sizes in SIZES:
            for offset in (0, 1):
                train(RULES[name], decay, sizes, steps=3, offset=offset)
    assert here.launches == 2 * len(SIZES) * 2 * 3 * 3
    updates = compiled(kernels.update, capability)
    assert len(updates) == 2  # with weight decay and without
    for kernel in updates:
        record_property("registers", assert_sound(kernel, tmp_path))
        code = kernel.asm["ptx"]
        # In the wide body a thread has twice 4 elements. 4 of FP32 are 16 bytes, and 4 of a half are 8.
        assert count(code, "ld.global.v4.b32") == 2 * (WIDE[name] + 1)  # one for FP32 gradients
        assert count(code, "st.global.v4.b32") == 2 * WIDE[name]
        assert count(code, "ld.global.v2.b32") == count(code, "st.global.v2.b32") == 2 * HALVES
        moments = 2 if name.startswith("adam") else 0
        assert count(code, "fma.rn.f32") == BODIES * ELEMENTS * moments  # the last addition of each moving average
        assert bool(count(code, "fma.rn.f64")) == bool(moments)  # inside of exp2, for the bias corrections
    (squares,), (norms,) = compiled(kernels.partial_squares, capability), compiled(kernels.norms, capability)
    for kernel in (squares, norms):
        record_property("registers", assert_sound(kernel, tmp_path))
        assert "fma" not in kernel.asm["ptx"]
    # A thread has 8 elements in each of 8 rounds: 16 bytes of FP16, as many of BF16, and twice as many of FP32.
    assert count(squares.asm["ptx"], "ld.global.v4.b32") == NORM_ROUNDS * (1 + 1 + 2) * NORM_BLOCK // 1024


def test_a_kernel_that_is_specialised_for_what_moves_is_noticed(kernels, driver, monkeypatch):
    driver(90)
    monkeypatch.setattr(kernels, "update", triton.jit(kernels.update.fn))
    for offset in (0, 1):
        train(RULES["sgd"], 0.0, offset=offset)
    assert len(compiled(kernels.update, 90)) == 2
