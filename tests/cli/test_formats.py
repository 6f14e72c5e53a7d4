"""What ``mptrain formats`` prints and writes, of a configuration and of a run."""

from __future__ import annotations

import json
import runpy

import pytest
from torch import nn

from mptrain.config.compose import compose
from mptrain.lab.formats.report import BANDS
from mptrain.run.resume import launch

TINY = ("model=mlp", "dataset.image_size=8", "dataset.train_samples=96", "train.batch_size=16", "train.epochs=5")


def test_a_configuration_is_trained_in_memory_and_nothing_is_written(terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert terminal("formats", *TINY, "--formats", "bf16,mxfp8,mxfp4") == 0
    first, _, head, *rows = terminal.out.splitlines()
    assert first.startswith("mlp at step 21: ")
    assert head.split()[:5] == ["format", "error", "at", "step", "21"]
    assert [row.split()[0] for row in rows[:3]] == ["bf16", "mxfp8", "mxfp4"]
    assert "it tells the error, not the speed or memory of a GPU" in " ".join(terminal.out.split())
    assert "--keep 20 looks for the layers" in terminal.out
    assert not list(tmp_path.iterdir())


def test_several_steps_and_an_object_for_programs(terminal):
    words = ("formats", *TINY, "--at", "1,25", "--formats", "mxfp8,nvfp4", "--keep", "50", "--json")
    assert terminal(*words) == 0
    answer = json.loads(terminal.out)
    assert answer["schema"] == "mptrain.formats/1"
    assert [step["step"] for step in answer["steps"]] == [1, 25]
    assert answer["verdicts"].keys() == {"mxfp8", "nvfp4"}
    assert set(answer["verdicts"].values()) <= {band.verdict for band in BANDS}
    last = answer["steps"][-1]
    assert last["judged"] == 1
    assert [errors["name"] for errors in last["formats"]] == ["mxfp8", "nvfp4"]
    assert last["keep"].keys() == {e["name"] for e in last["formats"] if e["error"] > BANDS[0].most}


def test_a_run_is_looked_at_after_its_last_checkpoint_and_gets_a_page(terminal, tmp_path):
    words = (*TINY, "precision=amp_dynamic", f"run.root={tmp_path}", "run.name=run")
    launch(compose(words), lambda info: ())
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert terminal("formats", str(tmp_path / "run"), "--formats", "mxfp8,mxfp4", "--keep", "60") == 0
    assert terminal.out.startswith("mlp at step 31: ")
    folder = tmp_path / "run" / "formats"
    assert sorted(path.name for path in folder.iterdir()) == ["formats.html", "formats.md", "torchao_filters.py"]
    assert str(folder / "formats.html") in terminal.out
    assert all(path.read_bytes() == content for path, content in before.items())
    page = (folder / "formats.md").read_text()
    assert "mxfp4" in page
    assert "Errors by parameter" in page
    filters = runpy.run_path(str(folder / "torchao_filters.py"))
    kept = filters["KEEP"]["mxfp4"]
    chosen = filters["filter_of"]("mxfp4")
    assert kept
    assert not chosen(nn.Linear(1, 1), kept[0])
    assert chosen(nn.Linear(1, 1), "another")


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ((*TINY, "--formats", "fp9"), "unknown format fp9", "one of fp16"),
        ((*TINY, "--formats", "mxpf8"), "unknown format mxpf8", "did you mean mxfp8"),
        ((*TINY, "--at", "3,2"), "--at 3,2: must be ascending", "--at N,N"),
        ((*TINY, "--keep", "120"), "--keep 120: must be at most 100", "--keep PERCENT"),
        ((*TINY, "--at", "99"), "step 99: training ends at step 30", "a step up to 30"),
    ],
)
def test_wrong_words_end_with_2(terminal, words, said, hint):
    assert terminal("formats", *words) == 2
    assert said in terminal.err
    assert hint in terminal.err


def test_at_is_not_for_a_run(terminal, tmp_path):
    assert terminal("formats", str(tmp_path), "--at", "3") == 2
    assert "--at is for a new configuration" in terminal.err
