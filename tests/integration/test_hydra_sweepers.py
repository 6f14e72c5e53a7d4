"""A sweeper that is installed as sweepers of Hydra's are drives real runs by their metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.small_runs import TINY, command, environment, run_command

pytestmark = pytest.mark.process

GREEDY = """
    from dataclasses import dataclass

    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.plugins.sweeper import Sweeper

    @dataclass
    class GreedyConf:
        _target_: str = "hydra_plugins.greedy.Greedy"
        factor: float = 2.0

    ConfigStore.instance().store(group="hydra/sweeper", name="greedy", node=GreedyConf)

    class Greedy(Sweeper):
        "Tries the values of one word, then the best of them times a factor; bad luck stops it."

        def __init__(self, factor):
            self.factor = factor

        def setup(self, *, hydra_context, task_function, config):
            self.hydra_context, self.config = hydra_context, config
            self.launcher = Plugins.instance().instantiate_launcher(
                hydra_context=hydra_context, task_function=task_function, config=config
            )

        def sweep(self, arguments):
            fixed = [word for word in arguments if "," not in word]
            [(key, values)] = [word.split("=") for word in arguments if "," in word]
            tried = {float(value): None for value in values.split(",")}
            self.ask(fixed, key, tried, 0)
            best = max(tried, key=tried.get)
            self.ask(fixed, key, {best * self.factor: None}, len(tried))

        def ask(self, fixed, key, tried, first):
            batch = [[*fixed, f"{key}={value}"] for value in tried]
            self.validate_batch_is_legal(batch)
            for value, answer in zip(tried, self.launcher.launch(batch, initial_job_idx=first)):
                tried[value] = answer.return_value
"""
SEARCH = ("-m", "hydra/sweeper=greedy", *TINY, "precision=fp32", "run.name=mine")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hydra_plugins" / "greedy").mkdir(parents=True)
    (tmp_path / "hydra_plugins" / "greedy" / "__init__.py").write_text(textwrap.dedent(GREEDY))
    return tmp_path


def path_of(folder):
    return {"PYTHONPATH": f"{environment()['PYTHONPATH']}{os.pathsep}{folder}"}


def sweep_of(folder):
    return json.loads((folder / "outputs" / "mine" / "sweep.json").read_text())


@pytest.mark.slow
def test_sigterm_saves_the_jobs_and_the_same_words_use_moving_the_search(folder):
    # how many steps fit into the minutes is the machine's: the larger rate is one that never diverges, as 0.1 does after 700
    words = (*SEARCH, "run.resume=auto", "hydra.sweeper.factor=0.5", "optimizer.lr=0.000001,0.02", "log.seconds=0.05")
    process = subprocess.Popen(
        command(*words, "train.max_minutes=0.04", "train.epochs=100000"),
        cwd=folder,
        env=environment(**path_of(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in folder.glob("outputs/mine/000-*/steps.jsonl")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert [job["status"] for job in sweep_of(folder)["jobs"]] == ["preempted", "waiting"]
    assert "to run the rest: mptrain resume outputs/mine\n" in output

    again = run_command(*words, "train.max_minutes=0.04", "train.epochs=100000", cwd=folder, **path_of(folder))
    assert again.returncode == 0, again.stdout + again.stderr
    assert [(job["name"], job["status"]) for job in sweep_of(folder)["jobs"]] == [
        ("000-optimizer.lr=1e-06", "done"),
        ("001-optimizer.lr=0.02", "done"),
        ("002-optimizer.lr=0.01", "done"),  # half of the better one, as its metric said
    ]


def test_without_a_sweeper_nothing_of_this_is_imported(folder):
    words = ["-m", *TINY, "precision=fp33", "seed=0,1"]
    code = (
        f"import sys; from mptrain.cli.main import main; assert main({words!r}) == 2;"
        "found = {'mptrain.study.sweep.hydra_launcher', 'mptrain.study.commands.sweeper_search'} & set(sys.modules); assert not found, found;"
        "from hydra.core.config_store import ConfigStore;"
        "assert ConfigStore.instance().list('hydra/launcher') == ['basic.yaml']"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment(**path_of(folder)), check=False)
    assert process.returncode == 0


def test_a_sweeper_searches_with_an_option_of_the_users_own(folder):
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "mine.yaml").write_text("_target_: my_nets.small\n")
    (folder / "my_nets.py").write_text(
        "from torch import nn\n\n\ndef small(*, num_classes, in_channels, image_size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))\n"
    )
    allow = ("--config-dir", "conf", "extensions.allow=[my_nets]")
    words = [*SEARCH, *allow, "model=mine", "optimizer.lr=0.001,0.02", "--objective", "top_one"]
    done = run_command(*[word for word in words if word != "model=mlp"], cwd=folder, **path_of(folder))
    assert done.returncode == 6, done.stdout + done.stderr
    assert "No point has top_one on validation data; recorded: " in done.stdout
