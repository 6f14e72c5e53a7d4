from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mptrain.config.compose import compose
from mptrain.engine.parts import AHEAD, Transfer
from mptrain.engine.resources import forget_peak, memory_in_use, memory_now, memory_peak
from mptrain.engine.ring import Ring, StepValues
from mptrain.precision.support import cuda_support, require_support, resolve_device, supports
from mptrain.run.build.parallelism import device_of, require_own_devices
from mptrain.run.build.parts import build
from mptrain.system import device as devices
from mptrain.system.errors import ConfigError, EnvironmentRefused
from mptrain.system.process_state import cuda_backends, random_state, set_random_state
from tests.capability import CPU, NoFP64, without
from tests.loops import each
from tests.pretended_ranks import each_rank

WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.fixture(autouse=True)
def _asked_anew():
    """Have devices asked for their capabilities in each test, and again in those that follow."""
    devices.capabilities.cache_clear()
    yield
    devices.capabilities.cache_clear()


@pytest.fixture
def pretend(monkeypatch):
    """Give torch accelerators that are not there, with a module that says what theirs would."""

    def put(kind, count=1, **said):
        module = SimpleNamespace(is_available=lambda: True, device_count=lambda: count, **said)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        return module

    return put


@pytest.fixture
def nothing_there(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


BATCH = SimpleNamespace(tensors=dict)
XPU = SimpleNamespace(has_fp64=False, has_fp16=True, total_memory=2**34)


@each(
    ("level", "built", "runs"),
    [
        ((7, 0), WHEEL, False),
        ((6, 1), WHEEL, False),
        ((7, 5), WHEEL, True),
        ((8, 0), WHEEL, True),
        ((8, 9), WHEEL, True),  # by sm_86
        ((9, 0), WHEEL, True),
        ((10, 3), WHEEL, True),  # by sm_100
        ((11, 0), WHEEL, False),  # another major version
        ((12, 1), WHEEL, True),
        ((13, 0), WHEEL, False),
        ((13, 0), (*WHEEL, "compute_120"), True),  # compiled by the driver
        ((7, 0), ("sm_50", "compute_60"), True),
        ((7, 0), ("compute_75",), False),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_90a",), True),
        ((9, 1), ("sm_90a",), False),
        ((10, 3), ("sm_100f",), True),
        ((12, 0), ("compute_90a",), False),
        ((8, 0), ("gfx90a", "nonsense"), False),
        ((8, 0), (), False),
    ],
)
def test_a_device_runs_code_of_its_version_and_earlier_ptx(level, built, runs):
    assert devices.has_kernels(level, built) == runs


def test_a_device_that_torch_was_not_built_for_is_refused_whatever_is_forced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(WHEEL))
    monkeypatch.setattr(torch.version, "hip", None)
    policy = compose(["precision=amp_dynamic", "precision.force=true"]).precision
    with pytest.raises(EnvironmentRefused, match=r"no kernels for compute capability 7\.0, only for sm_75") as why:
        require_support(policy, torch.device("cuda", 0))
    assert "install a torch build" in why.value.hint
    assert "force" not in why.value.hint
    assert cuda_support(policy, (7, 5), WHEEL).ok
    assert cuda_support(policy, (7, 0)).ok  # where the build says nothing


def test_thresholds_of_nvidia_are_not_held_against_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pytest.fail("means something else there"))
    device = torch.device("cuda", 0)
    support = supports(compose(["precision=amp_bf16"]).precision, device)
    assert (support.ok, support.reason) == (True, "ROCm has bfloat16; untested")
    assert not supports(compose(["precision=tf32"]).precision, device).ok
    assert "ROCm/HIP is untested" in devices.untried(device)
    monkeypatch.setattr(torch.version, "hip", None)
    assert devices.untried(device) == ""


@pytest.mark.usefixtures("nothing_there")
@pytest.mark.parametrize(
    ("name", "needs"), [("cuda", "doctor"), ("xpu", "Intel GPU"), ("xpu:1", "Intel GPU"), ("mps", "Apple silicon")]
)
def test_an_accelerator_that_is_not_there_is_refused_with_what_to_do(name, needs):
    with pytest.raises(EnvironmentRefused, match=f"device={name}: torch sees no {name.upper()[:3]}") as why:
        resolve_device(name)
    assert needs in why.value.hint
    assert "device=cpu" in why.value.hint
    assert resolve_device("auto") == CPU


def test_auto_leaves_untried_accelerators_alone_and_cuda_names_them(pretend):
    pretend("mps")
    assert resolve_device("auto") == CPU
    assert resolve_device("mps") == torch.device("mps", 0)
    with pytest.raises(EnvironmentRefused) as why:
        resolve_device("cuda")
    assert why.value.hint == "this machine has mps, which is untested: use device=mps or device=cpu"
    with pytest.raises(EnvironmentRefused, match="there is one MPS device"):
        resolve_device("mps:1")


def test_capabilities_of_xpu_are_what_its_properties_say(pretend):
    pretend("xpu", 2, get_device_properties=lambda device: XPU, get_device_name=lambda device: "Arc")
    device = resolve_device("xpu:1")
    has = devices.capabilities(device)
    assert (has.fp64, has.fp16, has.bf16, has.pinned, has.streams) == (False, True, True, True, True)
    assert (has.graphs, has.fused, has.tf32) == (False, False, False)
    assert devices.widest(device) == torch.float32
    assert "without FP64" in devices.untried(device)
    assert not supports(compose(["precision=tf32"]).precision, device).ok
    assert supports(compose(["precision=fp16_dynamic"]).precision, device).ok
    assert devices.total_memory(device) == 2**34


def test_mps_has_neither_fp64_nor_streams_and_bf16_from_macos_14_on(pretend, monkeypatch):
    pretend("mps")
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    has = devices.capabilities(torch.device("mps", 0))
    assert not any((has.fp64, has.bf16, has.pinned, has.streams, has.graphs, has.fused))
    assert has.fp16
    refused = supports(compose(["precision=bf16"]).precision, torch.device("mps", 0))
    assert (refused.ok, refused.advice) == (False, "use precision=fp32")


def test_ranks_exchange_nothing_on_untried_accelerators():
    for name in ("mps", "xpu"):
        with pytest.raises(ConfigError, match=f"device={name} with 2 ranks"):
            device_of(name, SimpleNamespace(world_size=2, local_rank=0))


@pytest.fixture
def on_ranks(monkeypatch):
    """A function that lets each of two ranks, which see the GPUs that are given, resolve its device and compare it."""
    seen = threading.local()
    monkeypatch.setattr("mptrain.run.build.parallelism.count_of", lambda kind: len(seen.uuids))
    properties = "mptrain.run.build.parallelism.properties_of"
    monkeypatch.setattr(properties, lambda device: SimpleNamespace(uuid=seen.uuids[device.index]))
    monkeypatch.setattr("mptrain.run.build.parallelism.use", lambda device: None)
    monkeypatch.setattr("mptrain.precision.support.count_of", lambda kind: len(seen.uuids))

    def resolved(name, gpus):
        def rank(comm):
            seen.uuids = gpus[comm.rank]
            try:
                device = device_of(name, comm)
                require_own_devices(device, comm)
            except EnvironmentRefused as refused:
                return str(refused)
            return str(device)

        return each_rank(len(gpus), rank)

    return resolved


@each(
    ("name", "gpus", "devices"),
    [
        ("auto", (("a", "b"), ("a", "b")), ["cuda:0", "cuda:1"]),  # torchrun, or forked ranks
        ("auto", (("a",), ("b",)), ["cuda:0", "cuda:0"]),  # srun --gpus-per-task=1
        ("cuda", (("a", "b"), ("c", "d"), ("e", "f")), ["cuda:0", "cuda:1", "cuda:0"]),  # srun --gpus-per-task=2
        ("cuda", (("a", "b"), ("b",)), ["cuda:0", "cuda:0"]),
        ("auto", ((), ()), ["cpu", "cpu"]),
        ("cpu", (("a",), ("a",)), ["cpu", "cpu"]),
    ],
)
def test_each_rank_takes_a_gpu_of_those_that_it_sees(on_ranks, name, gpus, devices):
    assert on_ranks(name, gpus) == devices


@each(
    ("name", "gpus", "why"),
    [
        ("auto", (("a",), ("a",)), "ranks 0 and 1 have the same GPU"),
        ("cuda", (("a", "b"), ("a", "b"), ("a", "b")), "ranks 0 and 2 have the same GPU"),
        ("auto", (("a",), ()), "rank 1 sees no GPU, and other ranks do"),
        ("auto", ((), ("a",)), "rank 0 sees no GPU, and other ranks do"),
        ("cuda", ((), ()), "device=cuda: torch sees no CUDA device"),
    ],
)
def test_ranks_that_share_a_gpu_are_refused_by_name_on_all_of_them(on_ranks, name, gpus, why):
    assert on_ranks(name, gpus) == [why] * len(gpus)


def test_a_run_on_cuda_records_what_decides_the_bits_of_its_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr("mptrain.system.process_state._DRIVER", tmp_path / "version")
    device = torch.device("cuda", 0)
    assert cuda_backends(device)["driver"] == "unknown"
    said = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.2.0"
    )
    (tmp_path / "version").write_text(said)
    precision = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        found = cuda_backends(device)
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
    assert (found["compute_capability"], found["driver"]) == ("7.5", "550.54.15")
    assert found["cuda.matmul.fp32_precision"] == "tf32"
    assert cuda_backends(CPU) == {}


def test_an_untried_device_is_warned_of_once(monkeypatch):
    monkeypatch.setattr("mptrain.run.build.parts.untried", lambda device: f"device={device.type} is untried")
    parts, _ = build(compose(["model=mlp", "dataset.image_size=8"]))
    assert parts.warnings == ("device=cpu is untried",)
    monkeypatch.undo()
    assert devices.untried(CPU) == ""


def test_states_of_generators_are_kept_by_the_kind_of_device(pretend):
    kept = {}
    pretend(
        "xpu",
        get_rng_state=lambda device: torch.tensor([device.index]),
        set_rng_state=lambda state, device: kept.update({device: state.item()}),
    )
    states = random_state(torch.device("xpu", 3))
    assert states["xpu"].item() == 3
    set_random_state(states, torch.device("xpu", 1))
    assert kept == {torch.device("xpu", 1): 3}
    set_random_state(states, torch.device("mps", 0))  # keeps its own
    assert len(kept) == 1


def test_memory_is_asked_of_the_devices_own_module(pretend):
    forgotten = []
    pretend(
        "xpu",
        memory_allocated=lambda device: 5,
        max_memory_allocated=lambda device: 7,
        reset_peak_memory_stats=forgotten.append,
    )
    device = torch.device("xpu", 0)
    forget_peak(device)
    assert (memory_in_use(device), memory_now(device), memory_peak(device), forgotten) == (5, 7, 7, [device])
    pretend("mps", current_allocated_memory=lambda: 9)
    device = torch.device("mps", 0)
    forget_peak(device)
    assert (memory_in_use(device), memory_now(device), memory_peak(device)) == (9, 9, 9)


def test_records_and_batches_take_the_way_of_streams_only_where_there_are_some(monkeypatch):
    """torch's CPU has streams and events that do nothing, so both ways can be gone here."""
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, zeros=torch.zeros, **how: zeros(*size, **how))
    made = []
    monkeypatch.setattr(torch.cpu, "Event", lambda event=torch.cpu.Event: made.append(1) or event())
    monkeypatch.setattr(torch.cpu, "Stream", lambda device, stream=torch.cpu.Stream: stream())
    rows = []
    for there in (False, True):
        with without(streams=there, pinned=there):
            ring = Ring(4, 1, CPU)
            wide = [torch.ones(1, dtype=torch.float64)] * 2
            ring.record(StepValues(torch.ones(()), *[torch.ones(1)] * 3, wide[0], torch.zeros(1), wide[0], wide[1]))
            ring.send()
            assert ring.arrived
            rows.append(ring.take(wait=False))
            assert len(made) == there
            transfer = Transfer(CPU)
            assert all(transfer(lambda: BATCH) is BATCH for _ in range(AHEAD + 1))
            assert len(made) == (AHEAD + 2) * there
    assert rows[0] == rows[1]


def test_a_ring_holds_fp32_where_there_is_no_fp64():
    with without(fp64=False), NoFP64():
        ring = Ring(4, 2, CPU)
        one = torch.ones(1)
        ring.record(StepValues(torch.tensor(0.1), one, one, one, torch.tensor([float("inf")]), one, one, torch.ones(2)))
        (row,) = ring.take(wait=True)
    assert (row.loss, row.overflow, row.norms) == (torch.tensor(0.1).item(), True, [1.0, 1.0])


#: Files about what CUDA alone has: captured graphs, and the mode that says where the host waits.
CUDAS_OWN = {"engine/step_runner.py"}


def test_only_one_module_calls_torch_cuda():
    root = Path(devices.__file__).parents[1]
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if "torch.cuda." in path.read_text("utf-8")}
    assert found - CUDAS_OWN == {"system/device.py"}
