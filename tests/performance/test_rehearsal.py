"""The suite for a GPU goes through on a CPU, so that a rare GPU is not spent on its mistakes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.goals import GOALS
from benchmarks.results import read

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_goal_of_the_gpu_suite_is_reached_in_a_rehearsal(tmp_path):
    words = ["--suite", "gpu", "--rehearse", "--no-peers", "--budget", "60", "--out", str(tmp_path / "gpu.json")]
    subprocess.run([sys.executable, "-m", "benchmarks.run", *words], cwd=ROOT, env={**os.environ}, check=True)
    results = read(tmp_path / "gpu.json")
    assert results.failures == {}
    assert {row.goal for row in results.measurements} == {name for name in GOALS if name.startswith("G")}
    what = {row.what for row in results.measurements}
    assert "share of the device's time: convolutions and products" in what


def gpu(python, *words, timeout=60):
    """``benchmarks/gpu.sh`` with another Python."""
    environment = {**os.environ, "PYTHON": str(python), "BUDGET": "30"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        ["benchmarks/gpu.sh", *map(str, words)],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def needs(distribution, *extras):
    """Return the requirements of a distribution here, with some of its extras."""
    found = map(Requirement, importlib.metadata.requires(distribution) or [])
    chosen = [{"extra": extra} for extra in ("", *extras)]
    return [one for one in found if one.marker is None or any(one.marker.evaluate(extra) for extra in chosen)]


def test_all_that_mptrain_and_its_tests_need_is_packed_but_what_images_with_torch_have(tmp_path):
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(f'#!/bin/sh\nif [ "$1" = - ]; then exec {sys.executable} -; fi\nprintf "%s\\n" "$@" >>{asked}\n')
    python.chmod(0o755)
    assert gpu(python, "pack", tmp_path / "wheels").returncode == 0
    packed = {word for word in asked.read_text().split("\n") if word}
    own = {Requirement(word).name for word in packed if word[0].isalpha() and "/" not in word}
    wanted = needs("mptrain", "test")
    inner = [extra for one in wanted if one.name == "mptrain" for extra in one.extras]
    names = {one.name for one in (*wanted, *needs("mptrain", *inner))} - {"mptrain", "torch", "torchvision"}
    assert {"scipy", "pytest-xdist", "sentencepiece"} <= names <= own
    assert not own & {"torch", "torchvision", "mptrain"}


OF_TORCH = (
    "torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl",
    "torchvision-0.26.0-cp312-cp312-manylinux_2_28_x86_64.whl",
    "triton-3.6.0-cp312-cp312-manylinux_2_27_x86_64.whl",
    "nvidia_cublas-13.1.0.3-py3-none-manylinux_2_27_x86_64.whl",
    "nvidia_nccl_cu12-2.28.9-py3-none-manylinux_2_18_x86_64.whl",
    "cuda_bindings-13.0.3-cp312-cp312-manylinux_2_24_x86_64.whl",
)
OTHERS = ("timm-1.0.22-py3-none-any.whl", "torchmetrics-1.8.2-py3-none-any.whl", "tritonclient-2.6-py3-none-any.whl")


def test_torch_and_cuda_are_not_packed_although_timm_requires_them(tmp_path):
    python, wheels = tmp_path / "python", tmp_path / "wheels"
    names = " ".join((*OF_TORCH, *OTHERS))
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = - ]; then exec {sys.executable} -; fi\ncd {wheels} && [ "$3" = wheel ] || touch {names}\n'
    )
    python.chmod(0o755)
    assert gpu(python, "pack", wheels).returncode == 0
    assert {path.name for path in wheels.iterdir()} == set(OTHERS)


@pytest.mark.parametrize("wheel", OF_TORCH)
def test_a_folder_with_a_torch_of_its_own_is_not_run(tmp_path, wheel):
    for name in (wheel, *OTHERS):
        (tmp_path / name).touch()
    refused = gpu("/bin/false", "run", tmp_path, tmp_path / "out")
    assert refused.returncode == 2
    assert "would hide this machine's own" in refused.stderr


def image_with_torch(folder):
    """A Python that has torch and torchvision, what they need, and pip, as images with torch do; nothing is copied."""
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    left, seen = ["torch", "torchvision"], set()
    while left:
        if (name := left.pop()) in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for place in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            if not (packages / place).exists():
                (packages / place).symlink_to(distribution.locate_file(place))
        left += [one.name for one in needs(name)]
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tests_and_suite_for_a_gpu_go_through_in_an_image_that_has_torch_and_little_else(tmp_path):
    """Needs a network, for the wheels."""
    python = image_with_torch(tmp_path / "image")
    absent = "import importlib.util as u; print([n for n in ('pytest', 'hydra', 'scipy', 'mptrain') if u.find_spec(n)])"
    assert subprocess.check_output([python, "-c", absent], text=True, cwd=tmp_path) == "[]\n"
    version = ".".join(map(str, sys.version_info[:2]))
    packed = gpu(python, "pack", tmp_path / "wheels", version, timeout=300)
    assert packed.returncode == 0, packed.stderr
    done = gpu(python, "rehearse", tmp_path / "wheels", tmp_path / "out", timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
    assert read(tmp_path / "out" / "gpu.json").failures == {}
