"""``mptrain doctor``: prints installed versions, devices and the precision modes that each device supports."""

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
from mptrain.cli.messages import print_rows
from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.runlog.atomic_files import free_bytes, readable_bytes
from mptrain.system.errors import EXIT_ENVIRONMENT, EXIT_OK, Problem
from mptrain.system.machine import usable_cores

if TYPE_CHECKING:
    import torch

    from mptrain.precision.support import Support

#: Modules that training needs.
NEEDED = ("torch", "torchvision", "hydra", "omegaconf", "pydantic", "rich", "sklearn", "PIL")

#: Modules that this command itself needs to describe the devices.
ASKED = ("torch", "omegaconf", "pydantic")

_DISTRIBUTIONS = {"hydra": "hydra-core", "sklearn": "scikit-learn", "PIL": "pillow"}


def doctor() -> int:
    """Print the environment (versions, memory, disk), the devices, and the precision modes that each device supports.

    Returns:
        The exit code: 0, or 3 if a required module is missing or broken.
    """
    broken = [problem for name in NEEDED if (problem := try_import(name))]
    untried = "; untested" if sys.version_info >= (3, 14) else ""
    outputs = Path("outputs")
    rows = [
        ("mptrain", __version__),
        ("python", f"{platform.python_version()} ({sys.executable}){untried}"),
        *((name, _version(name)) for name in NEEDED),
        ("system", platform.platform() + ("" if sys.platform == "linux" else "; untested")),
        ("memory", readable_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))),
        ("disk", f"{readable_bytes(free_bytes(outputs))} free for {outputs.absolute()}"),
    ]
    print_rows("environment", rows)
    if not any(problem.what.startswith(f"{name}:") for problem in broken for name in ASKED):
        devices = _devices()
        print()
        print_rows("devices", [(name, text) for name, text, _ in devices])
        for name, _, device in devices:
            print()
            _print_support(name, device)
    for problem in broken:
        print(f"\nbroken: {problem.what}\n  fix: {problem.hint}")
    return EXIT_ENVIRONMENT if broken else EXIT_OK


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


def _devices() -> list[tuple[str, str, torch.device]]:
    """Return the name, description and torch device of each device that can train on this machine."""
    import torch

    from mptrain.system import device as devices
    from mptrain.system.torch_private import has_native_half

    halves = _arithmetic({"FP16": has_native_half("float16"), "BF16": has_native_half("bfloat16")})
    cores, used = usable_cores(), torch.get_num_threads()
    threads = (
        f"{cores} core{'s' * (cores != 1)}, {used} thread{'s' * (used != 1)}, {torch.backends.cpu.get_cpu_capability()}"
    )
    text = f"{_cpu_name()}, {threads}; arithmetic: {halves}"
    found = [("cpu", text, torch.device("cpu"))]
    kind = "cuda" if devices.count_of("cuda") else devices.other_accelerator()
    names = [f"{kind}:{index}" for index in range(devices.count_of(kind))] if kind else []
    return found + [(name, _accelerator(torch.device(name)), torch.device(name)) for name in names]


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


def _print_support(name: str, device: torch.device) -> None:
    """Print the support of each precision mode on a device, grouping modes with the same result."""
    from omegaconf import OmegaConf

    from mptrain.config.value_checks import check_section
    from mptrain.precision.policy import Policy
    from mptrain.precision.support import supports

    said: dict[Support, list[str]] = {}
    for mode, option in Catalogue([location.configs()]).groups["precision"].items():
        tree: Any = OmegaConf.to_container(OmegaConf.load(option.path))
        policy = check_section("precision", tree.get("precision"), Policy, [])
        if policy is not None:
            said.setdefault(supports(policy, device), []).append(mode)
    order = ("supported", "supported, slower", "unsupported")
    rows = [
        (verdict(support), f"{', '.join(modes)} ({'; '.join(filter(None, (support.reason, support.advice)))})")
        for support, modes in said.items()
    ]
    print_rows(f"precision on {name}", sorted(rows, key=lambda row: order.index(row[0])))
