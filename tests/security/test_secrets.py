"""The values of secrets in the environment stand in no record of a run or a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from mptrain.cli.main import main
from mptrain.config.compose import Composer, compose, reload
from mptrain.config.config_diff import diff
from mptrain.report.html_and_markdown import write_page
from mptrain.report.page import Cell, Page
from mptrain.runlog.atomic_files import write_atomically
from mptrain.runlog.run_paths import fresh_name
from mptrain.study.comparison.results import write_comparisons
from mptrain.study.recipe.expectations import ExpectationResult
from mptrain.study.recipe.reproduction import RecipeVerdict, Reproduction, write_verdict
from mptrain.system.masking import MaskedText, masked
from tests.small_runs import TINY, run_command
from tests.study.recipe.some_recipe import some_recipe

SECRET = "s3cret-Value'\"\\x"
PLAIN = "s3cretValue0123"


@pytest.fixture
def secret(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKER_API_KEY", PLAIN)
    return "${oc.env:TRACKER_API_KEY}"


@pytest.mark.parametrize("name", ["HF_TOKEN", "aws_secret", "MY_API_KEY", "DB_PASSWORD", "GOOGLE_CREDENTIALS"])
def test_what_looks_like_a_secret_is_written_as_its_name(monkeypatch, name):
    monkeypatch.setenv(name, SECRET)
    shown = f"${{oc.env:{name}}}"
    assert masked(f"a {SECRET} b") == f"a {shown} b"
    assert masked({"a": [SECRET, 1.5, None], SECRET: (SECRET,)}) == {"a": [shown, 1.5, None], shown: (shown,)}
    assert SECRET not in masked(json.dumps(SECRET))
    assert masked(f"{json.dumps(SECRET)} {SECRET!r}").count(shown) == 2


def test_other_values_and_short_ones_stay(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "short")
    monkeypatch.setenv("SOME_FOLDER", "/a/long/path")
    assert masked("short /a/long/path") == "short /a/long/path"


def test_a_saved_configuration_means_the_same_without_the_secret(secret):
    word = f"dataset.train_samples=96 logger=wandb logger.project={PLAIN}".split()
    config = compose([*TINY, *word])
    assert config.logger.arguments["project"] == PLAIN
    assert PLAIN not in config.yaml
    assert f"project: {secret}" in config.yaml
    again = reload(config.yaml)
    assert again.logger.arguments["project"] == PLAIN
    assert diff(config.yaml, again.yaml, ignoring=()) == []
    asked = compose([*TINY, *word[:2], "logger.project=${oc.env:TRACKER_API_KEY}"])
    assert asked.yaml == config.yaml


def test_pages_comparisons_diagnoses_and_what_trackers_print_hold_none(secret, tmp_path, monkeypatch):
    monkeypatch.setenv("ODD_SECRET", '<it\'s & "odd">')
    page = Page("Run", PLAIN, Cell("done"), f'{PLAIN} <it\'s & "odd">', ())
    written = write_page(page, tmp_path, tmp_path / "p.html", tmp_path / "p.md")
    assert "odd" not in written.html.read_text()
    for path in (written.html, written.md):
        assert PLAIN not in path.read_text()
        assert "TRACKER_API_KEY" in path.read_text().replace("\\", "")
    write_comparisons(tmp_path / "comparison.json", {"": SimpleNamespace(to_dict=lambda: {"arm": PLAIN})})
    assert PLAIN not in (tmp_path / "comparison.json").read_text()
    write_atomically(tmp_path / "x", f'a {PLAIN} "{PLAIN}"')
    assert (tmp_path / "x").read_text() == f'a {secret} "{secret}"'
    assert "mlp-__oc.env_TRACKER_API_KEY_-fp32" in fresh_name(f"mlp-{PLAIN}-fp32")[1]
    stream = MaskedText((tmp_path / "log").open("wb"), encoding="utf-8")
    print(f"logged in with {PLAIN}", file=stream)
    stream.close()
    assert (tmp_path / "log").read_text() == f"logged in with {secret}\n"


def records(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_no_file_of_a_run_holds_a_secret_and_the_run_goes_on(secret, monkeypatch):
    words = [*TINY, "train.max_steps=2", "run.name=run", f"run.root=out/{PLAIN}/x"]
    monkeypatch.setattr("sys.argv", ["mptrain", *words])
    assert main(words) == 0
    held = records("out")
    assert held
    assert [name for name, content in held.items() if PLAIN.encode() in content] == []
    root = f"out/{PLAIN}/x/run"
    assert secret in Path(root, "config.yaml").read_text()
    assert secret in Path(root, "run.json").read_text()
    assert main(["resume", root, "train.max_steps=3"]) == 0
    assert main([*words[:-3], "train.max_steps=3", *words[-2:], "run.resume=auto"]) == 0
    assert main(["report", root]) == 0
    assert [name for name, content in records("out").items() if PLAIN.encode() in content] == []


def test_a_data_set_that_is_called_by_a_secret_shows_it_nowhere(secret, capsys):
    for number in range(16):
        path = Path(f"pictures/train/{'ab'[number % 2]}/{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 9, 0, 0)).save(path)
    words = ["model=mlp", "dataset=image_folder", "dataset.root=pictures", "dataset.image_size=8", "dataset.workers=0"]
    words += ["dataset.val_samples=4", "train.batch_size=4", "train.max_steps=2", "logger=tensorboard"]
    words.append(f"dataset.name={secret}")
    assert main(words) == 0
    [run] = Path("outputs").glob("*/*")
    assert main(["report", str(run)]) == 0
    assert main(["resume", str(run), "train.max_steps=3"]) == 0
    assert main([*words, "run.name=nothing", "optimizer.lr=no"]) == 2
    assert json.loads((run / "data.json").read_text())["name"] == secret
    assert [name for name, content in records("outputs").items() if PLAIN.encode() in content] == []
    shown = capsys.readouterr()
    assert PLAIN not in shown.out + shown.err
    assert f"dataset    {secret}, " in shown.out


def test_no_diagnosis_and_no_verdict_holds_a_secret(secret, tmp_path):
    root = f"out/{PLAIN}/run"
    words = [
        *TINY,
        "precision=fp16_static",
        "scaler.scale=1e30",
        "train.max_consecutive_overflows=2",
        f"run.root=out/{PLAIN}",
    ]
    assert main([*words, "run.name=run"]) == 4
    assert main(["diagnose", root]) == 0
    assert main(["diagnose", root, "scaler.scale=1"]) == 0
    held = records("out")
    assert sum("/diagnosis/" in name and name.endswith(".json") for name in held) == 2
    assert [name for name, content in held.items() if PLAIN.encode() in content] == []
    recipe = some_recipe()
    verdict = RecipeVerdict((ExpectationResult(f"{PLAIN} = 1", "met", f"it is {PLAIN}", {}),))
    path = write_verdict(Reproduction(recipe, False, (f"run.root={PLAIN}",), tmp_path, (), Composer()), verdict)
    assert PLAIN not in path.read_text()
    assert f"run.root={secret}" in path.read_text()


def test_a_traceback_and_a_reason_hold_no_secret(secret, monkeypatch):
    from mptrain.engine.loop import Loop

    def fail(_):
        raise LookupError(f"no entry for {PLAIN}")

    monkeypatch.setattr(Loop, "run", fail)
    assert main([*TINY, "run.name=run"]) == 1
    for path in ("failure/traceback.txt", "run.json"):
        content = Path("outputs/run", path).read_text()
        assert PLAIN not in content
        assert f"no entry for {secret}" in content


@pytest.mark.process
def test_no_file_of_a_sweep_holds_a_secret_and_the_sweep_goes_on(tmp_path):
    words = ["-m", *TINY, "train.max_steps=1", "run.name=mine", "seed=0,1", f"run.root={PLAIN}"]
    done = run_command(*words, cwd=tmp_path, TRACKER_API_KEY=PLAIN)
    assert done.returncode == 0, done.stderr
    held = records(tmp_path / PLAIN)
    assert any(name.endswith(".log") for name in held)
    assert [name for name, content in held.items() if PLAIN.encode() in content] == []
    again = run_command("resume", f"{PLAIN}/mine", cwd=tmp_path, TRACKER_API_KEY=PLAIN)
    assert again.returncode == 0, again.stderr
    again = run_command(*words, "run.resume=auto", cwd=tmp_path, TRACKER_API_KEY=PLAIN)
    assert again.returncode == 0, again.stderr
