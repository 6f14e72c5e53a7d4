"""``mptrain doctor``: installed versions, devices, and the precision modes that each device supports."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain import __version__
from mptrain.cli.command import Outcome
from mptrain.cli.messages import print_rows
from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.lab.doctor.machine import Device, Machine, Mode
from mptrain.runlog.atomic_files import free_bytes, readable_bytes
from mptrain.system.errors import EXIT_ENVIRONMENT, EXIT_OK, Problem
from mptrain.system.machine import usable_cores

if TYPE_CHECKING:
    import torch

    from mptrain.cli.answer import Answer
    from mptrain.precision.support import Support

#: Modules that training needs.
NEEDED = ("torch", "torchvision", "hydra", "omegaconf", "pydantic", "rich", "sklearn", "PIL")

#: Modules that this command itself needs to describe the devices.
ASKED = ("torch", "omegaconf", "pydantic")

_DISTRIBUTIONS = {"hydra": "hydra-core", "sklearn": "scikit-learn", "PIL": "pillow"}


def doctor() -> Outcome:
    """Examine the environment (versions, memory, disk), the devices, and the precision modes that each supports.

    Returns:
        The machine; the exit code is 0, or 3 if a required module is missing or broken.
    """
    broken = tuple(problem for name in NEEDED if (problem := try_import(name)))
    untried = "; untested" if sys.version_info >= (3, 14) else ""
    outputs = Path("outputs")
    environment = {
        "mptrain": __version__,
        "python": f"{platform.python_version()} ({sys.executable}){untried}",
        **{name: _version(name) for name in NEEDED},
        "system": platform.platform() + ("" if sys.platform == "linux" else "; untested"),
        "memory": readable_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "disk": f"{readable_bytes(free_bytes(outputs))} free for {outputs.absolute()}",
    }
    blind = any(problem.what.startswith(f"{name}:") for problem in broken for name in ASKED)
    machine = Machine(environment, () if blind else tuple(_devices()), broken)
    code = EXIT_ENVIRONMENT if broken else EXIT_OK
    return Outcome(code, lambda: _print(machine), lambda: _answer(machine))


def _print(machine: Machine) -> None:
    print_rows("environment", list(machine.environment.items()))
    if machine.devices:
        print()
        print_rows("devices", [(device.name, device.description) for device in machine.devices])
    for device in machine.devices:
        print()
        _print_modes(device)
    for problem in machine.broken:
        print(f"\nbroken: {problem.what}\n  fix: {problem.hint}")


def try_import(name: str) -> Problem | None:
    """Import a Python module that training needs, and return the problem, or None if the import succeeds.

    Args:
        name: Name of the module, such as ``torch``.
    """
    try:
        if name == "sklearn":  # slow to import, and training only reads the digits that come with it
            there = importlib.util.find_spec(name)
            return None if there else Problem("sklearn: not installed", "pip install scikit-learn")
        importlib.import_module(name)
    except ImportError as error:
        return Problem(f"{name}: {error}", f"pip install {_DISTRIBUTIONS.get(name, name)}")
    except Exception as error:  # an incompatible binary raises RuntimeError, OSError and others on import
        if "torchvision::nms does not exist" in str(error):
            return Problem(
                f"torchvision {_version('torchvision')} was not built for torch {_version('torch')}: {error}",
                "install both from the same source: pip install --force-reinstall torch torchvision, "
                "or both with --index-url https://download.pytorch.org/whl/cpu",
            )
        return Problem(f"{name}: {type(error).__name__}: {error}", f"reinstall {name}")
    return None


def verdict(support: Support) -> str:
    """Describe the support of a precision mode by a device: ``supported``, ``supported, slower`` or ``unsupported``."""
    if not support.ok:
        return "unsupported"
    return "supported, slower" if support.advice else "supported"


def _version(name: str) -> str:
    try:
        return metadata.version(_DISTRIBUTIONS.get(name, name))
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[Device]:
    # Imported here: this command also runs where torch is broken, and says so.
    import torch

    from mptrain.system import device as devices
    from mptrain.system.torch_private import has_native_half

    halves = _arithmetic({"FP16": has_native_half("float16"), "BF16": has_native_half("bfloat16")})
    cores, used = usable_cores(), torch.get_num_threads()
    threads = (
        f"{cores} core{'s' * (cores != 1)}, {used} thread{'s' * (used != 1)}, {torch.backends.cpu.get_cpu_capability()}"
    )
    text = f"{_cpu_name()}, {threads}; arithmetic: {halves}"
    cpu = [Device("cpu", text, _modes(torch.device("cpu")))]
    kind = "cuda" if devices.count_of("cuda") else devices.other_accelerator()
    names = [f"{kind}:{index}" for index in range(devices.count_of(kind))] if kind else []
    return cpu + [Device(name, _accelerator(device := torch.device(name)), _modes(device)) for name in names]


def _accelerator(device: torch.device) -> str:
    """Return a one-line description of an accelerator."""
    from mptrain.system import device as devices

    has = devices.capabilities(device)
    known = {"FP16": has.fp16, "BF16": has.bf16, "TF32": has.tf32}
    memory = f", {readable_bytes(size)}" if (size := devices.total_memory(device)) else ""
    if device.type == "cuda" and not devices.is_rocm():
        level = "compute capability {}.{}".format(*devices.compute_capability(device))
        return f"{devices.name_of(device)}, {level}{memory}; tensor cores: {_arithmetic(known)}"
    units = _arithmetic({**known, "FP64": has.fp64})
    return f"{devices.name_of(device)}{memory}; arithmetic: {units}; {devices.untried(device)}"


def _arithmetic(known: Mapping[str, bool]) -> str:
    return ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in known.items())


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _modes(device: torch.device) -> dict[str, Mode]:
    """Return the support of each precision mode by a device."""
    from omegaconf import OmegaConf

    from mptrain.config.value_checks import check_section
    from mptrain.precision.policy import Policy
    from mptrain.precision.support import supports

    modes = {}
    for name, option in Catalogue([configs_folder()]).groups["precision"].items():
        tree: Any = OmegaConf.to_container(OmegaConf.load(option.path))
        policy = check_section("precision", tree.get("precision"), Policy, [])
        if policy is not None:
            support = supports(policy, device)
            modes[name] = Mode(verdict(support), support.reason, support.advice)
    return modes


def _print_modes(device: Device) -> None:
    """Print the support of each precision mode by a device, grouping modes with the same result."""
    names_by_mode: dict[Mode, list[str]] = {}
    for name, mode in device.modes.items():
        names_by_mode.setdefault(mode, []).append(name)
    order = ("supported", "supported, slower", "unsupported")
    rows = [
        (mode.verdict, f"{', '.join(names)} ({'; '.join(filter(None, (mode.reason, mode.advice)))})")
        for mode, names in names_by_mode.items()
    ]
    print_rows(f"precision on {device.name}", sorted(rows, key=lambda row: order.index(row[0])))


def _answer(machine: Machine) -> Answer:
    from mptrain.lab.answers import DoctorAnswer

    return DoctorAnswer(machine=machine)
