"""What comes from a stranger runs no code: checkpoints, weights, configurations, recipes, runs and sweeps."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import shutil
import tarfile
import time
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from mptrain.cli.main import main
from mptrain.config.compose import compose, reload
from mptrain.engine.weights_io import read_weights
from mptrain.runlog import RunPaths, create_run
from mptrain.runlog.checkpoint_data import NotPlain, insert_shards, load_plain
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.manifest import Manifest, manifest_name, read_manifest
from mptrain.study.recipe.recipe import read_recipe
from mptrain.system.errors import CheckpointError, ConfigError, StorageError
from tests.loops import each
from tests.small_runs import TINY

ONE_STEP = (*TINY, "train.max_steps=2", "run.name=run")

MODULE = """
from pathlib import Path
Path("it-ran").touch()
from mptrain.workloads.classification.models.perceptron import mlp
def network(*, num_classes: int, in_channels: int, image_size: int, hidden: tuple = (8,), dropout: float | None = None):
    return mlp(num_outputs=num_classes, input_shape=(in_channels, image_size, image_size))
"""


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("it-ran",)


@pytest.fixture(autouse=True)
def _nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A module that can be imported and leaves a trace when it is."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/strangers_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    yield ("model._target_=strangers_module.network", "extensions.allow=[strangers_module]")
    import sys

    sys.modules.pop("strangers_module", None)


def run(capsys, *words):
    capsys.readouterr()
    code = main(list(words))
    return code, capsys.readouterr().err.splitlines()


def plant(folder, state, **fields):
    """A checkpoint whose manifest is in order in every respect but what the fields say."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "step-00000001.pt"
    torch.save(state, data)
    content = data.read_bytes()
    known = {"file": data.name, "sha256": sha256(content).hexdigest(), "bytes": len(content), **fields}
    manifest = Manifest(step=1, records={}, metric=None, config_digest="abc", **known)
    path = folder / manifest_name(1)
    path.write_text(manifest.to_json())
    return path


def test_a_checkpoint_that_is_a_pickle_of_something_else_runs_nothing(tmp_path):
    plant(tmp_path / "checkpoints", {"weights": Bomb()})
    with pytest.raises(CheckpointError, match="cannot be loaded safely"):
        CheckpointStore(tmp_path / "checkpoints", keep=2).load_latest()
    assert not Path("it-ran").exists()


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", "a/b.pt", ""])
def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path, name):
    path = plant(tmp_path / "checkpoints", {"step": 1}, file=name)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(path)


@pytest.mark.parametrize("content", [Bomb(), {"state_dict": {"weight": Bomb()}}])
def test_weights_that_are_a_pickle_of_something_else_run_nothing(tmp_path, content):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="cannot be read as a file of plain tensors"):
        read_weights(tmp_path / "weights.pt")
    assert not Path("it-ran").exists()


def archive_with(pickled):
    """A file of torch.save with another pickle in it."""
    sound, whole = io.BytesIO(), io.BytesIO()
    torch.save({"weight": torch.ones(2)}, sound)
    with zipfile.ZipFile(sound) as before, zipfile.ZipFile(whole, "w") as after:
        for name in before.namelist():
            after.writestr(name, pickled if name.endswith(".pkl") else before.read(name))
    return whole.getvalue()


ENDLESS = pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02c" + b"x" * 600_000 + b"\ny\n.",
        b"\x80\x02ctorch\n" + b"y" * 600_000 + b"\n.",
        b"\x80\x02X" + (600_000).to_bytes(4, "little") + b"k" * 600_000 + b"Q.",
    ],
)


@ENDLESS
def test_names_without_end_in_a_file_do_not_take_time_without_end(tmp_path, pickled):
    (tmp_path / "weights.pt").write_bytes(archive_with(pickled))
    before = time.monotonic()
    with pytest.raises(NotPlain) as refused:
        load_plain(tmp_path / "weights.pt")
    assert time.monotonic() - before < 10  # hours, if torch makes its own sentence of it
    assert len(str(refused.value)) <= 200
    assert torch._weights_only_unpickler.UnpicklingError is pickle.UnpicklingError


@ENDLESS
def test_names_without_end_in_a_part_take_no_time_without_end(tmp_path, pickled):
    part = tmp_path / "rank-0.pt"
    part.write_bytes(archive_with(pickled))
    files = {part.name: sha256(part.read_bytes()).hexdigest()}
    before = time.monotonic()
    with pytest.raises(CheckpointError, match="cannot be loaded safely") as refused:
        insert_shards({"weight": {"__part__": "/weight", "shape": [2]}}, tmp_path, files)
    assert time.monotonic() - before < 10
    assert len(str(refused.value)) < 300 + len(str(tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("blocks", [0, 2])
def test_an_archive_that_torch_would_unpack_is_left_alone(tmp_path, monkeypatch, blocks):
    monkeypatch.setattr("tempfile.mkdtemp", lambda *_, **__: pytest.fail("a folder was made"))
    with tarfile.open(tmp_path / "weights.pt", "w") as archive:
        for number in range(blocks):
            archive.addfile(tarfile.TarInfo(f"storages{number}"), io.BytesIO(b""))
    with pytest.raises(NotPlain, match="tar archive"):
        load_plain(tmp_path / "weights.pt")


def test_what_a_failed_run_kept_of_its_last_step_runs_nothing(capsys, tmp_path):
    assert main(list(ONE_STEP)) == 0
    failure = tmp_path / "outputs/run/failure"
    failure.mkdir()
    torch.save({"batch": Bomb()}, failure / "step.pt")
    (failure / "diagnosis.json").write_text('{"step": 1}')
    run(capsys, "diagnose", "outputs/run")
    assert not Path("it-ran").exists()


@functools.cache
def saved():
    return compose(TINY).yaml


GROUPS = ("model", "task", "dataset", "optimizer", "schedule", "scaler", "logger")


@each(
    ("group", "path"),
    [
        *((group, "os.system") for group in GROUPS),
        *(("model", path) for path in ("builtins.eval", "mptrain.cli.main.main", "pty.spawn")),
    ],
)
def test_a_saved_configuration_calls_nothing_but_parts_of_mptrain(group, path):
    text = saved().split("\n")
    place = text.index(f"{group}:") + 1
    text[place] = f"  _target_: {path}"
    with pytest.raises(ConfigError, match="is not in an allowed package"):
        reload("\n".join(text))


@pytest.mark.parametrize(
    "target",
    [
        "{_target_: mptrain.logger.tracker_process.main}",
        "{_target_: mptrain.logger.base.load_or_create_id, file: it-ran}",
    ],
)
def test_what_runs_trackers_is_none(capsys, stranger, target):
    """It unpickles what it reads, imports packages, writes files."""
    Path("conf/logger").mkdir(parents=True)
    Path("conf/logger/evil.yaml").write_text(target)
    code, errors = run(capsys, "--config-dir", "conf", "logger=evil", *ONE_STEP)
    assert code == 2
    assert "is not in an allowed package (mptrain.logger.NoLogger, " in errors[0]
    assert not Path("it-ran").exists()


@pytest.mark.parametrize(
    "said",
    ["allow: [strangers_module]", "allow: ['${seed}', strangers_module]", "allow: '${model.hidden}'", "'${model}'"],
)
def test_a_saved_configuration_cannot_say_whose_code_is_trusted(stranger, said):
    text = saved().replace("extensions:\n  allow: []\n  sinks: []", f"extensions:\n  {said}")
    assert said in text
    for words in ((), ("train.epochs=1",), ("model.nonsense=1",), ("~extensions.allow",), ("extensions={}",)):
        with pytest.raises(ConfigError, match="the saved configuration runs code from outside mptrain"):
            reload(text, words)
    assert not Path("it-ran").exists()


@pytest.mark.parametrize("command", ["resume", "eval", "export", "diagnose", "replay"])
def test_a_run_with_code_of_others_asks_whoever_types_and_goes_on_when_told(capsys, stranger, command):
    assert main([*ONE_STEP, *stranger]) == 0, capsys.readouterr().err
    more = ("train.max_steps=3",) if command == "resume" else ()
    Path("it-ran").unlink()
    import sys

    sys.modules.pop("strangers_module")
    for word in ((), ("extensions.allow=[strangers]",)):
        code, errors = run(capsys, command, "outputs/run", *more, *word)
        assert code == 2
        assert "strangers_module" in errors[0]
        assert not Path("it-ran").exists()
    assert errors != run(capsys, command, "outputs/run", *more)[1]
    code, errors = run(capsys, command, "outputs/run", *more, stranger[-1])
    assert code == 0, errors
    assert Path("it-ran").exists()


def test_the_same_line_again_goes_on_with_a_run_with_code_of_ones_own(capsys, stranger):
    words = [*TINY, *stranger, "run.name=run", "run.resume=auto", "train.max_steps=2"]
    assert main(words) == 0
    assert main(words) == 0


def test_a_file_of_options_cannot_say_whose_code_is_trusted(capsys, stranger):
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/evil.yaml").write_text(
        "# @package _global_\n# It looks harmless.\nextensions: {allow: [strangers_module]}\n"
        "model: {_target_: strangers_module.network}\n"
    )
    code, errors = run(capsys, "--config-dir", "conf", "model=evil", *ONE_STEP[1:])
    assert code == 2
    word = stranger[-1]
    assert errors == [
        f"error: a chosen file runs code from outside mptrain: {word}",
        f"hint: if you trust that code, add '{word}' to the command line",
    ]
    assert not Path("it-ran").exists()
    assert run(capsys, "--config-dir", "conf", "model=evil", *ONE_STEP[1:], word)[0] == 0


@pytest.mark.parametrize("flags", [(), ("--cfg", "job"), ("-m", "seed=0,1")])
def test_a_file_at_the_top_imports_no_module_by_its_search_path(capsys, stranger, flags):
    Path("conf").mkdir()
    from mptrain.config.catalogue import configs_folder

    top = (configs_folder() / "train.yaml").read_text()
    Path("conf/top.yaml").write_text(f"{top}\nhydra:\n  searchpath: ['pkg://strangers_module']\n")
    code, errors = run(capsys, "--config-dir", "conf", "--config-name", "top", *flags)
    assert code == 2
    assert errors[0].endswith("conf/top.yaml: 'hydra.searchpath' is set by mptrain")
    assert not Path("it-ran").exists()


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("callbacks: {x: {_target_: strangers_module.network}}", "hydra.callbacks"),
        ("sweeper: {params: {x: {_target_: strangers_module.network}}}", "hydra.sweeper"),
        *(  # attributes of what Hydra, or an installed plugin, has imported
            (f"sweeper: {{params: {{x: {{_target_: {path}, path: it-ran}}}}}}", "hydra.sweeper")
            for path in (
                "hydra._internal.core_plugins.basic_sweeper.logging.os.mkdir",
                "hydra_plugins.helpful.os.mkdir",
                "hydra_plugins.helpful.mkdir",
            )
        ),
    ],
)
def test_a_file_of_options_cannot_give_hydra_something_to_call(capsys, stranger, said, key):
    Path("lib/hydra_plugins").mkdir()
    Path("lib/hydra_plugins/helpful.py").write_text("import os\nfrom os import mkdir\n")
    Path("conf/debug").mkdir(parents=True)
    Path("conf/debug/evil.yaml").write_text(f"# @package _global_\nhydra:\n  {said}\n")
    words = ("-m", "--config-dir", "conf", "debug=evil", "hydra/sweeper=basic", "seed=0,1", *TINY)
    code, errors = run(capsys, *words)
    assert code == 2
    assert any(f"{key} would call" in line for line in errors), errors
    assert not Path("it-ran").exists()


@pytest.mark.parametrize("word", ["model._target_=os.system", "+extensions.allow=[os]", "hydra.searchpath=[pkg://x]"])
def test_a_recipe_cannot_call_what_mptrain_does_not_offer(tmp_path, word):
    recipe = {"title": "t", "claim": "c", "source": "s", "base": [*TINY, word], "seeds": [0]}
    recipe |= {"arms": {"a": ["precision=fp32"], "b": ["precision=amp_bf16"]}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    code = main(["reproduce", str(tmp_path / "recipe.yaml")])
    assert code == 2
    with pytest.raises(ConfigError):
        compose([*read_recipe(tmp_path / "recipe.yaml").base])


@pytest.mark.parametrize(
    "text", ["seed: !!python/object/apply:os.mkdir [it-ran]", "seed: ${eval:1}", "seed: ${oc.x:1}"]
)
def test_yaml_makes_no_objects_and_computes_nothing(text):
    with pytest.raises(ConfigError):
        reload(saved().replace("seed: 0", text))
    assert not Path("it-ran").exists()


@pytest.mark.parametrize("name", ["../../x", "/x", "a/../../x", "..", "a\x1b[2Jb"])
def test_the_name_of_a_run_stays_below_its_root(tmp_path, name):
    with pytest.raises(ConfigError, match=r"run\.name="):
        create_run(tmp_path / "outputs", "label", name)
    with pytest.raises(ConfigError):
        compose([*TINY, f"run.name='{name}'"])


@pytest.mark.parametrize("name", ["checkpoints", "steps.jsonl", "lock", "failure", "summary.json"])
def test_a_link_in_the_folder_of_a_run_is_not_written_through(capsys, tmp_path, name):
    assert main(list(ONE_STEP)) == 0
    target = tmp_path / "precious"
    if name in ("checkpoints", "failure"):
        target.mkdir()
        (target / "mine.pt").write_text("precious")
    else:
        target.write_text("precious")
    place = RunPaths(Path("outputs/run")).root / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    for words in (("resume", "outputs/run", "train.max_steps=3"), (*ONE_STEP, "run.resume=auto")):
        code, errors = run(capsys, *words)
        assert code == 6
        assert errors[0] == f"error: outputs/run/{name} is a symbolic link"
        assert errors[1].startswith("hint: ")
    assert (target / "mine.pt" if target.is_dir() else target).read_text() == "precious"


@pytest.mark.parametrize("name", ["failure/step.pt", "samples/x-000001.tsv", "checkpoints/a.parts/b", "diagnosis/x"])
def test_a_link_in_a_folder_of_a_run_is_neither_written_through_nor_shown(capsys, tmp_path, name):
    assert main(list(ONE_STEP)) == 0
    precious = tmp_path / "precious"
    precious.write_text("precious words")
    place = Path("outputs/run", name)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(precious)
    for words in (("resume", "outputs/run", "train.max_steps=3"), ("report", "outputs/run"), ("report", "last")):
        code, errors = run(capsys, *words)
        assert code == 6
        assert errors[0] == f"error: outputs/run/{name} is a symbolic link"
    assert precious.read_text() == "precious words"
    assert not Path("outputs/run/report.html").exists()


def test_an_error_shows_no_control_sequence(capsys):
    code, errors = run(capsys, "model.\x1b[2J\x07=1")
    assert code == 2
    assert all(line.isprintable() for line in errors)


def test_a_folder_that_is_no_run_is_not_loaded(tmp_path):
    with pytest.raises(StorageError):
        CheckpointStore(tmp_path, keep=1).load("last")
