"""Copies of the tree with interpreters of their own, in which faults are planted and tests are run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.planted_faults.first_failure import REPORT
from tests.planted_faults.mapping import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

#: Seconds after which a test that has not ended counts as failed.
HANGS = 100

#: The variable by whose value the processes of a copy are found.
_MARK = "MPTRAIN_PLANTED_COPY"


class Failure(NamedTuple):
    """A test that failed, and True where it did not come to an end."""

    test: str
    hung: bool


class Late(Exception):
    """Tests did not end in time."""


def default_markers():
    """Return the marker expression of the tests that plain ``pytest`` runs; empty where it runs all."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    options = shlex.split(settings.get("addopts", ""))
    return options[options.index("-m") + 1] if "-m" in options else ""


class Copy:
    """A copy of the tree in a folder of its own.

    Args:
        folder: Made here.

    Attributes:
        tree: The copy.
    """

    def __init__(self, folder):
        self.tree = folder / "tree"
        self._temporary, self._report = folder / "tmp", folder / "failure.json"
        self._mark, self._closed = secrets.token_hex(8), False
        left_out = shutil.ignore_patterns(".git", ".venv*", "outputs", "data", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, self.tree, ignore=left_out, symlinks=True)
        (self.tree / "outputs").mkdir()
        self._python = self._environment(folder / "venv")

    def _environment(self, folder):
        """Return an interpreter whose processes import this copy, wherever they run, and all else from where this one does."""
        venv.EnvBuilder(symlinks=True).create(folder)
        python = folder / "bin" / "python"
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (packages / "00_tree.pth").write_text(f"import sys; sys.path.insert(0, {str(self.tree)!r})\n")
        (packages / "shared.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
        command = folder / "bin" / "mptrain"
        command.write_text(f'#!/bin/sh\nexec {python} -m mptrain "$@"\n')
        command.chmod(0o755)
        return python

    @contextlib.contextmanager
    def planted(self, fault):
        """A region in which the copy has a fault."""
        path = self.tree / "mptrain" / fault.file
        text = path.read_text(encoding="utf-8")
        self._write(path, text.replace(fault.old, fault.new))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path, text):
        path.write_text(text, encoding="utf-8")
        # Two versions of equal length within a second are one to Python.
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)

    def first_failure(self, *words, deadline):
        """Run pytest; return the first failure, None where all tests passed or none was chosen.

        Raises:
            Late: The deadline (of `time.monotonic`) has passed.
            RuntimeError: pytest itself failed, or the copy was closed.
        """
        if self._closed:
            raise RuntimeError("the copy was closed")
        self._report.unlink(missing_ok=True)
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        command = [str(self._python), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p"]
        command += ["tests.planted_faults.first_failure", f"--timeout={HANGS}", f"--basetemp={self._temporary / 'own'}"]
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MPTRAIN_TRACEBACK")
        }
        own = {REPORT: str(self._report), _MARK: self._mark, "TMPDIR": str(self._temporary)}
        process = subprocess.Popen(
            [*command, *words],
            cwd=self.tree,
            env={**inherited, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Late from None
        finally:
            self._end_processes()
            process.wait()
        if self._report.exists():
            return Failure(**json.loads(self._report.read_text(encoding="utf-8")))
        if process.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"pytest ended with {process.returncode}:\n{output[-2000:]}")
        return None

    def close(self):
        """End the tests that are running here, and run none any more; another thread may be waiting for them."""
        self._closed = True
        self._end_processes()

    def _end_processes(self):
        """End what the tests have started and left behind."""
        mark = f"{_MARK}={self._mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
