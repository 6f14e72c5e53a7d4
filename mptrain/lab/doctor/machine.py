"""Support of precision modes by the devices of a machine, and its environment, as ``mptrain doctor`` shows them."""

from __future__ import annotations

from dataclasses import dataclass

from mptrain.system.errors import Problem


@dataclass(frozen=True)
class Mode:
    """Support of a precision mode by a device.

    Attributes:
        verdict: ``supported``, ``supported, slower`` or ``unsupported``.
        reason: Feature that the device has or lacks.
        advice: Alternative or warning; may be empty.
    """

    verdict: str
    reason: str
    advice: str


@dataclass(frozen=True)
class Device:
    """Device that can train on this machine: its name in torch, its description, and each precision mode by name."""

    name: str
    description: str
    modes: dict[str, Mode]


@dataclass(frozen=True)
class Machine:
    """Environment and devices of this machine.

    Attributes:
        environment: Versions, memory and disk, each in words, by name.
        devices: The devices; empty if a package that describes them is broken.
        broken: Required packages that are missing or broken, and how to fix them.
    """

    environment: dict[str, str]
    devices: tuple[Device, ...]
    broken: tuple[Problem, ...]
