"""Check that all ranks of a run train the same: configuration, code of the user, versions.

Each rank has read its own command line and files, and nothing that they exchange later would show a difference:
copies of the weights would drift apart (DDP), or the trained network would be a mixture (FSDP2).
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mptrain.config.allowed_targets import NOT_OF_USERS
from mptrain.config.config_diff import ABSENT, diff
from mptrain.config.schema import Config
from mptrain.config.value_checks import show
from mptrain.numerics.words import listed
from mptrain.parallel.communicator import Communicator
from mptrain.system.errors import ConfigError, Problem, user_packages
from mptrain.system.process_state import versions_now

#: Keys and sections that may differ between ranks. Rank 0 alone has a run directory, trackers and sinks, machines have
#: different numbers of cores, the code of the user is compared itself, and each rank has a device of its own
#: (`mptrain.run.build.parallelism.require_own_devices`).
_OWN = ("run", "logger", "extensions", "chosen", "device", "threads")

#: Libraries besides torch that compute samples, networks and updates.
_LIBRARIES = ("numpy", "torchvision", "timm")

#: Differences that are listed, at most.
_MOST = 8


@dataclass(frozen=True)
class _Ingredients:
    """Configuration of a rank as YAML, its sources and its versions, by name.

    ``code`` has the digest and the file of each imported module of the user.
    """

    config: str
    code: dict[str, tuple[str, str]]
    versions: dict[str, str]

    def differences(self, first: _Ingredients) -> Iterator[str]:
        """Yield in what this rank differs from rank 0, in words that follow ``rank N has``."""
        for name in first.versions.keys() & self.versions.keys():
            if self.versions[name] != first.versions[name]:
                yield f"{name} {self.versions[name]}, rank 0 has {first.versions[name]}"
        for name, (digest, file) in self.code.items():  # a module that one of them has not imported is not compared
            if first.code.get(name, (digest,))[0] != digest:
                yield f"other code of {name} ({file}) than rank 0"
        for key, theirs, own in diff(first.config, self.config, _OWN) if first.config != self.config else ():
            if own == ABSENT:
                yield f"no {key}, rank 0 has {key}={show(theirs)}"
            else:
                yield f"{key}={show(own)}, rank 0 has {'none' if theirs == ABSENT else show(theirs)}"


def require_same_ranks(config: Config, comm: Communicator) -> None:
    """Check that each rank has rank 0's configuration, code and versions; all ranks call this, on the host.

    Raises:
        ConfigError: A rank differs; the same on every rank, with the ranks and what differs.
    """
    if comm.world_size == 1:
        return
    with comm.together():
        own = _Ingredients(config.yaml, _code_of_user(), _versions())
        found = comm.all_gather_object(list(own.differences(comm.broadcast_object(own))))
    ranks = defaultdict(list)
    for rank, differences in enumerate(found):
        for words in differences:
            ranks[words].append(str(rank))
    sentences = [
        f"rank {who[0]} has {words}" if len(who) == 1 else f"ranks {listed(who, 8)} have {words}"
        for words, who in ranks.items()
    ]
    if len(sentences) > _MOST:
        sentences[_MOST:] = [f"{len(sentences) - _MOST} more differences between ranks"]
    if sentences:
        hint = (
            "start all ranks with one command line, and give all machines the same files of code and the same packages"
        )
        raise ConfigError([*map(Problem, sentences[:-1]), Problem(sentences[-1], hint)])


def _versions() -> dict[str, str]:
    others = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return versions_now() | {name: str(version) for name, version in others.items() if version}


def _code_of_user() -> dict[str, tuple[str, str]]:
    """Return digest and file of the source of each imported module that the user has allowed, or that lies beside it.

    Modules beside it, in the same folder of the search path, are what such code imports. Its path may differ between
    ranks. Compiled modules are left out, and so is the program that began the rank.
    """
    folders: set[Path] = set()
    for package in user_packages & sys.modules.keys():
        spec = getattr(sys.modules[package], "__spec__", None)
        places = (spec.submodule_search_locations or [spec.origin]) if spec else []
        folders.update(Path(place).resolve().parent for place in places if place)
    found = {}
    for name, module in list(sys.modules.items()):
        file, package = getattr(module, "__file__", None), name.partition(".")[0]
        if not isinstance(file, str) or not file.endswith(".py") or name == "__main__" or package in NOT_OF_USERS:
            continue
        path = Path(file).resolve()
        beside = "site-packages" not in path.parts and not folders.isdisjoint(path.parents)
        if beside or package in user_packages:
            with contextlib.suppress(OSError):
                found[name] = (hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
    return found
