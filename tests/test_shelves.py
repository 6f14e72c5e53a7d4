"""The kernel does without its shelves: a copy of the package that lacks them works, and says what is not there."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mptrain
from mptrain import shelves

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [package for package, _ in shelves.SHELVES.values()]
TINY = ("model=mlp", "dataset.train_samples=64", "train.epochs=1", "run.name=a")


def test_a_shelf_is_named_in_a_string_by_one_module_alone():
    named = re.compile("|".join(rf"{re.escape(package)}\b" for package in PACKAGES))
    names_one = {}
    for path in sorted((ROOT / "mptrain").rglob("*.py")):
        inside = ".".join(path.relative_to(ROOT).parts[:2])
        if path.name != "shelves.py" and inside not in PACKAGES:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            names_one |= {str(path.relative_to(ROOT)): text for text in texts if named.search(text)}
    assert names_one == {}


def test_public_functions_stay_callable_after_every_module_has_been_imported():
    script = (
        "import importlib, pkgutil, mptrain\n"
        "from mptrain import shelves\n"
        "for module in pkgutil.walk_packages(mptrain.__path__, 'mptrain.', onerror=lambda name: None):\n"
        "    try:\n"
        "        if not module.name.endswith(('__main__', '_entry')):  # programs\n"
        "            importlib.import_module(module.name)\n"
        "    except ImportError:  # an extra that is not installed\n"
        "        pass\n"
        "assert all(callable(getattr(mptrain, name)) for name in shelves.FUNCTIONS)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_no_module_beside_the_functions_has_the_name_of_one():
    assert not set(shelves.FUNCTIONS) & {module.name for module in pkgutil.iter_modules(mptrain.__path__)}


def test_the_table_names_the_commands_that_each_shelf_brings():
    from mptrain.cli.commands import COMMANDS

    assert tuple(COMMANDS) == shelves.COMMANDS
    for package, commands in shelves.SHELVES.values():
        if commands:
            shelf = importlib.import_module(f"{package}.shelf")
            brought = [name for name, command in COMMANDS.items() if command.run.__module__ == shelf.__name__]
            assert sorted(brought) == sorted(commands)


def without(tmp_path, *names):
    """Copy the package and its configurations without some shelves; return a function that runs commands of the copy."""
    copy = tmp_path / "copy"
    for folder in ("mptrain", "configs", "recipes"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name in names:
        shutil.rmtree(copy / shelves.SHELVES[name][0].replace(".", "/"))
    work = tmp_path / "work"
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(copy)}

    def run(*words, program=("-m", "mptrain")):
        return subprocess.run(
            [sys.executable, *program, *words], cwd=work, env=environment, capture_output=True, text=True, check=False
        )

    where = run(program=("-c", "import mptrain; print(mptrain.__file__)")).stdout
    assert where.startswith(str(copy)), where
    return run


def the_kernel_works(run):
    for words in (
        TINY,
        ("resume", "outputs/a", "train.epochs=2"),
        ("eval", "outputs/a", "--json"),
        ("export", "outputs/a"),
        ("report", "outputs/a"),
        ("report", "outputs/a", "--json"),
        ("runs", "--json"),
        ("list",),
        ("list", "precision"),
        ("copy", "model/mlp"),
        ("help",),
        ("help", "train"),
        ("completion", "bash"),
    ):
        done = run(*words)
        assert done.returncode == 0, (words, done.stderr)
    picture = (
        "import torchvision, numpy; from PIL import Image; Image.fromarray(numpy.zeros((8, 8), 'uint8')).save('x.png')"
    )
    assert run(program=("-c", picture)).returncode == 0
    predicted = run("predict", "outputs/a", "x.png")
    assert predicted.returncode == 0, predicted.stderr
    completed = run("--complete", "bash", "mptrain", "tr")
    assert "Traceback" not in completed.stderr


MISSING = {
    "lab": [["doctor"], ["diagnose", "outputs/a"], ["recommend", "outputs/a"], ["replay", "outputs/a"], ["find", "lr"]],
    "study": [
        ["compare", "outputs/a", "outputs/a"], ["reproduce", "loss_scaling"], ["list", "recipes"],
        ["-m", "model=mlp", "seed=1,2"], ["report", "--together", "outputs/a", "outputs/a2"],
    ],
    "integrations": [],
}  # fmt: skip


def what_is_missing_is_named(run, name):
    package = shelves.SHELVES[name][0]
    for words in MISSING[name]:
        done = run(*words)
        assert done.returncode == 3, (words, done.stderr)
        assert package in done.stderr
        assert "Traceback" not in done.stderr
    for function, module in shelves.FUNCTIONS.items():
        if module.startswith(f"{package}."):
            done = run(program=("-c", f"import mptrain; mptrain.{function}"))
            assert f"mptrain.{function} needs the package {package}" in done.stderr


@pytest.mark.process
def test_without_any_shelf_the_kernel_works_and_names_what_is_missing(tmp_path):
    run = without(tmp_path, *shelves.SHELVES)
    the_kernel_works(run)
    shutil.copytree(tmp_path / "work/outputs/a", tmp_path / "work/outputs/a2")
    for name in shelves.SHELVES:
        what_is_missing_is_named(run, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", shelves.SHELVES)
def test_without_one_shelf_the_kernel_works_and_names_what_is_missing(tmp_path, name):
    run = without(tmp_path, name)
    the_kernel_works(run)
    shutil.copytree(tmp_path / "work/outputs/a", tmp_path / "work/outputs/a2")
    what_is_missing_is_named(run, name)
    others = [shelf for shelf in shelves.SHELVES if shelf != name]
    if "study" in others:
        assert run("-m", "model=mlp", "dataset.train_samples=64", "train.epochs=1", "seed=1,2").returncode == 0
    if "lab" in others:
        assert run("doctor").returncode == 0
