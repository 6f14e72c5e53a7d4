"""``mptrain doctor``: what is installed, what the devices can do, and which precision suits them."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain import __version__
from mptrain.cli.messages import print_rows
from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.errors import EXIT_ENVIRONMENT, EXIT_OK, Problem
from mptrain.machine import usable_cores
from mptrain.runlog.storage import free_bytes, readable_bytes

if TYPE_CHECKING:
    import torch

    from mptrain.device import Capabilities
    from mptrain.precision.policy import Policy
    from mptrain.precision.support import Support

#: What training cannot do without: module, and what to install.
NEEDED = ("torch", "torchvision", "hydra", "omegaconf", "pydantic", "rich", "sklearn", "PIL")

#: What the rest of this command needs itself.
ASKED = ("torch", "omegaconf", "pydantic")

_DISTRIBUTIONS = {"hydra": "hydra-core", "sklearn": "scikit-learn", "PIL": "pillow"}


def doctor() -> int:
    """Prints everything there is to know about this machine.

    Returns:
        0, or 3 when something that is needed is missing or broken.
    """
    broken = [problem for name in NEEDED if (problem := try_import(name))]
    print_rows("environment", [*_versions(), *_machine()])
    if any(problem.what.startswith(f"{name}:") for problem in broken for name in ASKED):
        _print_broken(broken)
        return EXIT_ENVIRONMENT
    print()
    devices = _devices()
    print_rows("devices", [(name, text) for name, text, _ in devices])
    for name, _, device in devices:
        print()
        _print_support(name, device)
    _print_broken(broken)
    return EXIT_ENVIRONMENT if broken else EXIT_OK


def try_import(name: str) -> Problem | None:
    """What is wrong with a module that is needed, if anything."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        return Problem(f"{name}: {error}", f"pip install {_DISTRIBUTIONS.get(name, name)}")
    except Exception as error:  # importing a binary that does not fit raises RuntimeError, OSError and others
        return explain(name, error)
    return None


def explain(name: str, error: Exception) -> Problem:
    """The problem behind an import that failed otherwise than by absence."""
    if "torchvision::nms does not exist" in str(error):
        return Problem(
            f"torchvision {_version('torchvision')} was not built for torch {_version('torch')}: {error}",
            "install both from one place: pip install --force-reinstall torch torchvision, "
            "or both with --index-url https://download.pytorch.org/whl/cpu",
        )
    return Problem(f"{name}: {type(error).__name__}: {error}", f"install {name} again")


def verdict(support: Support) -> str:
    """How a mode runs on a device, in one word or two."""
    if not support.ok:
        return "refused"
    return "runs, slower" if support.advice else "suits"


def _print_broken(broken: list[Problem]) -> None:
    for problem in broken:
        print(f"\nbroken: {problem.what}\n  mend: {problem.hint}")


def _versions() -> list[tuple[str, str]]:
    untried = "; untried" if sys.version_info >= (3, 14) else ""
    rows = [("mptrain", __version__), ("python", f"{platform.python_version()} ({sys.executable}){untried}")]
    return rows + [(name, _version(name)) for name in NEEDED]


def _version(name: str) -> str:
    try:
        return metadata.version(_DISTRIBUTIONS.get(name, name))
    except metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> list[tuple[str, str]]:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    outputs = Path("outputs")
    return [
        ("system", platform.platform() + ("" if sys.platform == "linux" else "; untried")),
        ("memory", readable_bytes(pages * size)),
        ("disk", f"{readable_bytes(free_bytes(outputs))} free for {outputs.absolute()}"),
    ]


def _devices() -> list[tuple[str, str, torch.device]]:
    """Name, description and torch device of everything that can train here."""
    import torch

    from mptrain import device as devices
    from mptrain.precision.upcast import has_native_half

    halves = ", ".join(f"{name} {_has(has_native_half(dtype))}" for name, dtype in _HALVES)
    capability = torch.backends.cpu.get_cpu_capability()
    text = (
        f"{_cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, {capability}; arithmetic: {halves}"
    )
    found = [("cpu", text, torch.device("cpu"))]
    kind = "cuda" if devices.count_of("cuda") else devices.other_accelerator()
    count = devices.count_of(kind) if kind else 0
    return found + [
        (f"{kind}:{index}", _accelerator(device), device)
        for index in range(count)
        for device in [torch.device(f"{kind}:{index}")]
    ]


def _accelerator(device: torch.device) -> str:
    """Return what is known of an accelerator, in a line."""
    from mptrain import device as devices

    has = devices.capabilities(device)
    memory = f", {readable_bytes(size)}" if (size := devices.total_memory(device)) else ""
    if device.type == "cuda" and not devices.is_rocm():
        level = devices.compute_capability(device)
        units = ", ".join(f"{name} {_has(there)}" for name, there in _units(has))
        return f"{devices.name_of(device)}, compute capability {level[0]}.{level[1]}{memory}; tensor cores: {units}"
    units = ", ".join(f"{name} {_has(there)}" for name, there in (*_units(has), ("FP64", has.fp64)))
    return f"{devices.name_of(device)}{memory}; arithmetic: {units}; {devices.untried(device)}"


def _units(has: Capabilities) -> tuple[tuple[str, bool], ...]:
    return ("FP16", has.fp16), ("BF16", has.bf16), ("TF32", has.tf32)


_HALVES = (("FP16", "float16"), ("BF16", "bfloat16"))


def _has(present: bool) -> str:
    return "yes" if present else "no"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _policies() -> dict[str, Policy]:
    """The precision modes by name, in the order of their files."""
    from omegaconf import OmegaConf

    from mptrain.config.checks import check_section
    from mptrain.precision.policy import Policy

    policies = {}
    for name, option in Catalogue([location.configs()]).groups["precision"].items():
        tree: Any = OmegaConf.to_container(OmegaConf.load(option.path))
        policy = check_section("precision", tree.get("precision"), Policy, [])
        if policy is not None:
            policies[name] = policy
    return policies


def _print_support(name: str, device: torch.device) -> None:
    """Prints the modes, those together to which the device says the same."""
    from mptrain.precision.support import supports

    said: dict[Support, list[str]] = {}
    for mode, policy in _policies().items():
        said.setdefault(supports(policy, device), []).append(mode)
    order = ("suits", "runs, slower", "refused")
    rows = []
    for support, modes in sorted(said.items(), key=lambda item: order.index(verdict(item[0]))):
        why = f"{support.reason}; {support.advice}" if support.advice else support.reason
        rows.append((verdict(support), f"{', '.join(modes)} ({why})"))
    print_rows(f"precision on {name}", rows)
