"""Carries a fault out: in the forked process, from outside, or on the files between two attempts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.faults import hooks
from tests.faults.attempts import attempt, children_of
from tests.faults.drawing import DAMAGES
from tests.faults.references import NAME

SIGNALS = {"kill": signal.SIGKILL, "kill_saving": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigint": signal.SIGINT}

#: A disk of at least so many bytes.
SMALLEST_DISK = 16_384


def break_an_attempt(words, folder, fault, reference, *, lawful):
    """One attempt during which a fault happens."""
    if fault.place == "tmpfs":
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            _mount(folder / "outputs", max(SMALLEST_DISK, int(reference.size * fault.share)))
            return attempt(words, folder)
        fault = type(fault)(fault.kind, "operation", fault.share)  # no right to mount anything
    deed = partial(_deed(fault), folder)
    if fault.place == "seconds":
        from_outside = deed if fault.kind not in ("clock", "disk_full") else None
        if from_outside is None:  # what is inside a process begins with it
            return attempt(words, folder, partial(_struck_at, "start", 0.0, deed, fault, reference), lawful=lawful)
        return attempt(words, folder, None, (fault.share * reference.seconds, deed), fresh=fault.fresh, lawful=lawful)
    return attempt(words, folder, partial(_struck_at, fault.place, fault.share, deed, fault, reference), lawful=lawful)


def repair(folder, fault):
    """Undo what a fault did to the disk and the data, as its owner would before running again."""
    run = folder / "outputs" / NAME
    for place in (folder, folder / "outputs", run, run / "checkpoints"):
        if place.is_dir():
            place.chmod(0o777)
    if fault.place == "tmpfs" and (folder / "outputs").is_mount():
        subprocess.run(["mount", "-o", "remount,size=1g", str(folder / "outputs")], check=True)
    if (folder / "data-elsewhere").exists():
        (folder / "data-elsewhere").rename(folder / "data")
    if (folder / "picture").exists():
        (folder / "picture").replace(_picture(folder, fault))


def clear(folder):
    """Remove the folder of a case, and what is mounted in it."""
    if (folder / "outputs").is_mount():
        subprocess.run(
            ["umount", "-l", str(folder / "outputs")], check=True
        )  # workers of a killed run go a little later
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Damage:
    """What was done to one file: its content before and after."""

    path: Path
    before: bytes
    after: bytes

    def undo(self):
        self.path.write_bytes(self.before)

    def take_out(self):
        """Give back the one bit, where the file still holds it; whether it does."""
        content = bytearray(self.path.read_bytes())
        place = next(at for at, (one, other) in enumerate(zip(self.before, self.after, strict=True)) if one != other)
        if place >= len(content) or content[place] != self.after[place]:
            return False
        content[place] = self.before[place]
        self.path.write_bytes(content)
        return True


def damage(folder, fault):
    """Truncate files, or flip one bit in them; what was done."""
    done = []
    for path in _chosen(folder / "outputs" / NAME, fault.extra["file"]):
        before = path.read_bytes()
        if not before:
            continue
        at = min(int(fault.extra["where"] * len(before)), len(before) - 1)
        if fault.kind == "truncated":
            after = before[:at]
        else:
            after = bytearray(before)
            after[at] ^= 1 << fault.extra["bit"]
        path.write_bytes(after)
        done.append(Damage(path, before, bytes(after)))
    return done


def _chosen(run, name):
    """The files that a name of `drawing.FILES` or `drawing.PARTS` stands for."""
    folder, _, name_there = name.partition("/")
    which, _, ending = name_there.partition(".")
    if which in ("newest", "all"):
        ending, _, part = ending.partition("/")
        found = sorted((run / folder).glob(f"step-*.{ending}"), reverse=True)[: 1 if which == "newest" else None]
        if ending == "parts":
            found = [path for one in found for path in ([one / part] if part else sorted(one.iterdir()))]
        return [path for path in found if path.is_file()]
    path = run / name
    return [path] if path.is_file() else []


def _struck_at(place, share, deed, fault, reference, trace):
    """The hooks that carry a deed out in this process."""
    count = max(1, reference.counts[place])
    call = min(1 + int(share * count), count)
    return hooks.Hooks(trace, place, call, lambda: deed(os.getpid()), fault.extra.get("operation", 0))


def _deed(fault):
    """What happens: a function of the folder of the case and the process's id."""
    match fault.kind if fault.kind not in DAMAGES else fault.extra["after"]:
        case "sigint" if fault.extra["twice"]:
            return lambda folder, pid: (os.kill(pid, signal.SIGINT), os.kill(pid, signal.SIGINT))
        case "kill" | "kill_saving" | "sigterm" | "sigint" as kind:
            return lambda folder, pid: os.kill(pid, SIGNALS[kind])
        case "kill_rank":
            return lambda folder, pid: _kill_one(children_of(pid), fault.share)
        case "pause":
            return lambda folder, pid: _pause(pid, fault.extra["for"])
        case "disk_full":
            return lambda folder, pid: hooks.fill_the_disk()
        case "clock":
            return lambda folder, pid: hooks.shift_clock(fault.extra["hours"])
        case "read_only":
            return lambda folder, pid: _forbid(folder, fault.extra["folder"])
        case "data_gone":
            return lambda folder, pid: (folder / "data").rename(folder / "data-elsewhere")
        case "bad_picture":
            return lambda folder, pid: _spoil(folder, fault)
    raise AssertionError(fault.kind)


def _kill_one(processes, share):
    if processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[int(share * len(processes))], signal.SIGKILL)


def _pause(pid, seconds):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def _forbid(folder, which):
    run = folder / "outputs" / NAME
    place = {"outputs": folder / "outputs", "run": run, "checkpoints": run / "checkpoints"}[which]
    while not place.exists():
        place = place.parent
    place.chmod(0o555)


def _picture(folder, fault):
    found = sorted((folder / "data" / "train").rglob("*.png"))
    return found[int(fault.share * 7919) % len(found)]


def _spoil(folder, fault):
    path = _picture(folder, fault)
    whole = path.read_bytes()
    (folder / "picture").write_bytes(whole)
    path.write_bytes(
        {"cut": whole[: len(whole) // 2], "garbage": b"\x89PNG" + whole[::-1], "empty": b""}[fault.extra["how"]]
    )


def _mount(place, size):
    if os.getuid() != 0:
        raise PermissionError
    place.mkdir(exist_ok=True)
    if not place.is_mount():
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True, capture_output=True
        )
