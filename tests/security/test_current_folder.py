"""No helper process runs a module out of the current folder, though its name is that of the standard library's."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mptrain
from mptrain.config.compose import Composer
from mptrain.config.launcher import Launcher
from mptrain.logger.base import TrackedRun
from mptrain.logger.tracker_process import TrackerProcess
from mptrain.study.sweep.points import expand
from mptrain.study.sweep.processes import spawned, start
from mptrain.study.sweep.runner import plan_sweep, run_sweep
from mptrain.study.sweep.slurm_executor import _executor
from mptrain.system.interpreter import command, forget_current_folder
from tests import fake_slurm
from tests import jobs_that_end as jobs
from tests.own_trackers import Own
from tests.small_runs import TINY, Kept, environment

pytestmark = pytest.mark.process

#: The source of a shadow: it leaves a mark when it is imported.
_SHADOW = "import os\nopen({mark!r}, 'a').write({name!r} + ' ')\nraise SystemExit({name!r} + ' of the current folder was run')\n"

#: Modules that ``python -m`` imports itself, before the program begins.
_OF_PYTHON = frozenset({"runpy", "pkgutil", "importlib", "types", "inspect", "typing", "functools", "collections", "warnings", "weakref",
                        "operator", "keyword", "reprlib", "abc", "contextlib", "re", "enum", "sre_compile", "sre_parse", "copyreg",
                        "sre_constants", "dis", "opcode", "ast", "tokenize", "token", "linecache", "textwrap", "annotationlib"})  # fmt: skip


@pytest.fixture
def shadows(tmp_path, monkeypatch):
    """The current folder, with a module of each name of the standard library's, and where they leave their mark."""
    here = tmp_path / "here"
    here.mkdir()
    mark = tmp_path / "mark"
    for name in sys.stdlib_module_names:
        (here / f"{name}.py").write_text(_SHADOW.format(mark=str(mark), name=name))
    for name in ("torch", "hydra", "yaml", "numpy", "submitit"):
        (here / f"{name}.py").write_text(_SHADOW.format(mark=str(mark), name=name))
    monkeypatch.chdir(here)
    yield here
    assert not mark.exists(), f"run out of the current folder: {mark.read_text()}"


def python(*words, **extra):
    """A program that was started as a script, as the installed command is: its own folder is searched, not the current one."""
    return subprocess.run(
        [sys.executable, *words], env=environment(**extra), capture_output=True, text=True, timeout=120, check=False
    )


def test_a_sweep_runs_nothing_out_of_the_current_folder(shadows, tmp_path):
    script = tmp_path / "bin/mptrain"
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom mptrain.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    words = [*TINY, "train.max_steps=1", "seed=0,1", f"run.root={tmp_path}/out", "run.name=s", "logger=tensorboard"]
    done = python(str(script), "-m", *words)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out/s").glob("*/logger.log"))) == 2


def test_a_module_run_by_python_does_not_search_the_current_folder(shadows):
    for name in _OF_PYTHON:
        (shadows / f"{name}.py").unlink(missing_ok=True)
    started = python("-m", "mptrain", "list", "model")
    assert started.returncode == 0, started.stderr


def test_the_current_folder_stays_first_where_mptrain_itself_is_run_from_it(monkeypatch):
    checkout = str(Path(mptrain.__file__).parents[1])
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(sys, "path", [checkout, "/x"])
    forget_current_folder()
    assert sys.path == [checkout, "/x"]
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", ["", "/x"])
    forget_current_folder()
    assert sys.path == ["/x"]


def leave_word(path):
    import random  # noqa: F401

    Path(path).write_text(json.dumps(sys.path))


def test_a_fresh_process_runs_nothing_out_of_the_current_folder(shadows, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", *(folder for folder in sys.path if folder)])  # as of ``python -c``
    process = start(spawned(leave_word, tmp_path / "word"))
    process.join()
    assert process.exitcode == 0
    found = json.loads((tmp_path / "word").read_text())
    assert "" not in found


def test_a_tracker_runs_nothing_out_of_the_current_folder(shadows, tmp_path):
    heard = Kept()
    run = TrackedRun("name", tmp_path, tmp_path / "samples", {"a": 1}, 0)
    TrackerProcess(Own(close_seconds=60.0), run, tmp_path / "logger.log", heard).close()
    assert heard.records == []
    assert '"closed"' in (tmp_path / "own.jsonl").read_text()


def test_a_job_of_submitit_runs_nothing_out_of_the_current_folder(shadows, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    home = fake_slurm.install(tmp_path / "bin", sys.executable)
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    composer = Composer()
    (tmp_path / "s").mkdir()
    points = expand((f"seed={jobs.DONE}",), composer.catalogue)
    sweep = plan_sweep(points, tmp_path / "s", words=(f"seed={jobs.DONE}",))

    class Nobody:
        def __getattr__(self, name):
            return lambda *_: None

    launcher = Launcher(at_once=1)
    _, code = run_sweep(sweep, composer, jobs.program(jobs.finish_at_once), Nobody(), launcher=launcher)
    assert code == 0


def test_what_slurm_is_given_runs_nothing_out_of_the_current_folder(shadows, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    home = fake_slurm.install(tmp_path / "bin", sys.executable)
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    executor = _executor(Launcher(), tmp_path / "jobs")
    words = shlex.split(executor._submitit_command_str)
    assert words[-3:-1] == ["-m", "submitit.core._submit"]
    words[-2:] = ["json.tool", "--help"]  # some other module
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_a_command_keeps_options_and_words(shadows):
    done = subprocess.run(
        command("-Wignore", "-c", "import sys; print(sys.argv, sys.warnoptions)", "a", "-c"),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip().endswith("interpreter_entry.py', 'a', '-c'] ['ignore']")


#: Files that may start programs, and by what. Only ``system/interpreter.py`` puts together a command that runs Python.
_STARTERS = {
    "system/interpreter.py": {"sys.executable"},
    "lab/commands/doctor.py": {"sys.executable"},  # prints it
    "logger/tracker_process.py": {"subprocess"},
    "system/process_state.py": {"subprocess"},  # git
    "study/sweep/processes.py": {"multiprocessing"},
    "study/sweep/local_executor.py": {"multiprocessing"},  # pipes
}
_CALLS = {"system", "popen", "posix_spawn", "posix_spawnp", "fork_exec"}


def starters(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            place = node.value.id if isinstance(node.value, ast.Name) else ""
            if (place, node.attr) == ("sys", "executable"):
                yield "sys.executable"
            elif place == "os" and (node.attr in _CALLS or node.attr.startswith(("exec", "spawn"))):
                yield f"os.{node.attr}"
            elif place == "multiprocessing" and node.attr not in ("connection", "parent_process"):
                yield "multiprocessing"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (name for name in names if name in ("subprocess", "pty", "concurrent.futures.process"))
            if isinstance(node, ast.ImportFrom) and node.module == "concurrent.futures":
                yield from (alias.name for alias in node.names if alias.name == "ProcessPoolExecutor")


def test_programs_are_started_in_no_other_place():
    root = Path(mptrain.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        if "_data" not in path.parts and (ways := set(starters(ast.parse(path.read_text())))):
            found[str(path.relative_to(root))] = ways
    assert found == _STARTERS


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_pythons_that_libraries_start_do_not_search_the_current_folder(shadows, tmp_path):
    script = tmp_path / "bin/start"
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom mptrain.__main__ import main\nimport subprocess\n"
        "code = 'import random, json, typing; print(random.__file__)'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', code]).returncode)\n"
    )
    done = python(str(script))
    assert done.returncode == 0, done.stderr
    assert str(shadows) not in done.stdout
