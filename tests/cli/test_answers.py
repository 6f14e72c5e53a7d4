"""What commands print with ``--json``: one object that its committed schema describes, and the same exit code."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from jsonschema import Draft202012Validator

import mptrain
from mptrain.cli.command import JSON
from mptrain.cli.commands import COMMANDS
from mptrain.runlog.sweeps import SweepPaths
from mptrain.study.comparison.results import write_comparisons
from mptrain.system import errors
from tests.cli.answer_schemas import ANSWERS, SCHEMAS, files, schema_of
from tests.docs.pages import PAGES
from tests.loops import each
from tests.report.folders import HOSTILE, make_comparison, make_run, make_sweep, warning
from tests.report.microscope import make_looked_at, sampled_steps
from tests.small_runs import TINY, run_in_process


def parsed(text, command):
    """The object that a command printed, after validation."""
    assert text.count("\n") == 1, text
    assert text.endswith("\n")
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    schema = json.loads((SCHEMAS / f"{command}.json").read_text())
    Draft202012Validator(schema).validate(found)
    assert found["schema"] == schema["title"]
    return found


@pytest.fixture
def asked(tmp_path):
    """Ask a command for text and for data, in a folder; return the object."""

    def ask(command, *words, code=0):
        text = run_in_process(command, *words, cwd=tmp_path)
        data = run_in_process(command, *words, "--json", cwd=tmp_path)
        assert (text.returncode, data.returncode) == (code, code), text.stderr + data.stderr
        assert text.stdout.strip()
        return parsed(data.stdout, command)

    return ask


@each("answer", ANSWERS)
def test_the_committed_schemas_are_those_of_the_types(answer):
    Draft202012Validator.check_schema(schema_of(answer))
    for path, text in files().items():
        assert path.read_text() == text, "python tests/cli/answer_schemas.py writes the schemas; read what has changed"


def test_every_command_with_the_option_has_a_schema_and_a_row_and_all_fields_are_described():
    commands = sorted(name for name, one in COMMANDS.items() if JSON in one.options)
    assert commands == sorted(path.stem for path in SCHEMAS.iterdir())
    assert commands == sorted(
        re.findall(r"^\| `mptrain (\w+)` \| `mptrain\.\1/\d+` \|", PAGES["docs/programs.md"], re.M)
    )


def test_a_run_its_overflows_and_its_tensors(asked, tmp_path):
    make_run(tmp_path / "a", overflows={3: "calibrating", 30: "unexpected"}, metric=None, events=[warning("hm")])
    [report] = asked("report", "a")["reports"]
    assert (report["kind"], report["html"], report["points"]) == ("run", "a/report.html", [])
    main = report["run"]["learners"]["main"]
    assert main["overflows"] == {"calibrating": 1, "unexpected": 1}
    assert main["tensors"]["0.weight"] == {"kinds": {"inf": 2}, "first": 3, "last": 30}
    assert main["loss_scale"]["first"] == 65536
    assert [one["step"] for one in report["run"]["overflows"]] == [3, 30]
    assert report["run"]["events"] == [[7, "warning", "hm"]]


@pytest.mark.long
def test_a_loop_that_is_watched_has_the_same_object(asked, tmp_path):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mptrain.watch(model, optimizer, dir=tmp_path / "outputs/watched"):
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    [report] = asked("report", "outputs/watched")["reports"]
    assert (report["run"]["watched"], report["run"]["steps"]) == (True, 3)
    assert asked("runs")["runs"][0]["path"] == "outputs/watched"
    asked("recommend", "outputs/watched", code=6)


def test_what_is_not_finite_is_null_and_listed(asked, tmp_path):
    make_run(tmp_path / "a", metric=float("inf"))
    found = asked("report", "a")
    assert found["reports"][0]["run"]["summary"]["metric"] is None
    assert found["nonfinite"]["reports.0.run.summary.metric"] == "inf"


def test_runs_and_those_that_cannot_be_read(asked, tmp_path):
    make_run(tmp_path / "outputs/a", status="running")
    make_run(tmp_path / "outputs/b", status="failed", reason="it diverged")
    (tmp_path / "outputs/c").mkdir()
    (tmp_path / "outputs/c/run.json").write_text("{")
    found = asked("runs")
    assert {one["path"]: one["status"] for one in found["runs"]} == {"outputs/a": "killed", "outputs/b": "failed"}
    assert "outputs/c/run.json is damaged" in found["notes"][0]
    assert asked("runs", "outputs/b")["runs"][0]["reason"] == "it diverged"
    (tmp_path / "empty").mkdir()
    assert asked("runs", "empty")["runs"] == []
    assert run_in_process("runs", "nowhere", "--json", cwd=tmp_path).returncode == 6


@pytest.mark.long
def test_a_sweep_and_a_comparison(asked, tmp_path):
    points = [([f"scaler.scale={scale}"], "done", {"metric": 0.75}) for scale in (8, 64)]
    make_sweep(tmp_path / "sweep", [*points, (["scaler.scale=1"], "failed", None)])
    comparison = make_comparison(tmp_path / "compared")
    write_comparisons(SweepPaths(tmp_path / "compared").comparison, {"": comparison})
    sweep, compared = asked("report", "sweep", "compared")["reports"]
    assert [(one["words"], one["job"]["code"]) for one in sweep["points"]][1:] == [
        ({"scaler.scale": "64"}, 0),
        ({"scaler.scale": "1"}, -9),
    ]
    arms = compared["comparisons"][""]["arms"]
    assert [arm["verdict"]["word"] for arm in arms] == ["reference", "equivalent", "worse"]
    assert arms[0]["arm"]["runs"][0]["path"] == "run-0-0"
    assert "config" not in arms[0]["arm"]["runs"][0]
    assert (sweep["run"], compared["kind"]) == (None, "comparison")


def test_an_evaluation_and_its_answers_by_class(asked, tmp_path):
    words = ["model=mlp", "dataset.train_samples=64", "train.epochs=1", "run.name=a"]
    assert run_in_process(*words, cwd=tmp_path).returncode == 0
    found = asked("eval", "a", "--by-class", "precision.eval=fp32")
    assert [one["split"] for one in found["splits"]] == ["val", "test"]
    assert (found["run"], found["checkpoint"], found["step"], found["averaged"]) == ("outputs/a", "last", 2, False)
    test, by_class = found["splits"][1], found["by_class"]
    low, high = test["intervals"]["top1"]
    assert low < test["metrics"]["top1"] < high
    right = sum(row[place] for place, row in enumerate(by_class["confusion"]))
    assert right / sum(map(sum, by_class["confusion"])) == test["metrics"]["top1"]
    assert (tmp_path / by_class["page"]).is_file()
    assert "precision.eval" in found["notes"][0]
    assert asked("eval", "a")["by_class"] is None
    (tmp_path / by_class["page"]).unlink()
    (tmp_path / by_class["page"]).mkdir()
    refused = run_in_process("eval", "a", "--by-class", cwd=tmp_path)
    assert (refused.returncode, refused.stdout.count("split=")) == (6, 2)


def test_a_recommended_scale_and_too_few_histograms(asked, tmp_path):
    make_looked_at(tmp_path / "enough")
    make_looked_at(tmp_path / "few", sampled_steps(1))
    main = asked("recommend", "enough")["learners"]["main"]
    assert main["overrides"][-1] == f"scaler.scale={2 ** main['recommended']}"
    assert len(main["scales"]) == 25
    main = asked("recommend", "few", code=6)["learners"]["main"]
    assert (main["too_few"], main["recommended"], main["overrides"]) == (True, None, [])


def test_the_machine_a_data_set_and_a_model(asked):
    machine = asked("doctor")["machine"]
    assert machine["devices"][0]["modes"]["tf32"]["verdict"] == "unsupported"
    found = asked("doctor", "dataset=digits")
    assert sum(found["data"]["classes"]["train"]) == found["data"]["samples"]["train"]
    assert found["machine"] is found["model"] is None
    words = ("model=mlp", "dataset.image_size=8", "dataset.train_samples=32", "train.batch_size=8")
    model = asked("doctor", *words, "precision=fp16_static", "scaler.scale=16777216", code=4)["model"]
    assert [one["kind"] for one in model["findings"]] == ["scale"]
    assert model["findings"][0]["hint"].startswith("set scaler=static scaler.scale=")
    assert model["usable_exponents"]


@pytest.mark.long
def test_single_runs_have_no_verdict_and_a_configuration_that_is_sound_no_fix(asked, tmp_path):
    for number, model in enumerate(("mlp", "cnn")):
        words = (f"model={model}", *TINY[1:], "train.max_steps=2", f"run.name=r{number}")
        assert run_in_process(*words, cwd=tmp_path).returncode == 0
    found = asked("compare", "r0", "r1")
    assert found["comparison"] is None
    assert found["no_verdict"]
    assert "model._target_" in found["differing"]
    found = asked("diagnose", *TINY, "precision=amp_dynamic", "scaler.init_scale=1024")
    assert (found["diagnosis"]["cause"], found["fix"], found["html"]) == ("none", None, "")


@each(
    ("words", "code"),
    [(("report", "nowhere"), 6), (("compare",), 2), (("diagnose", "--nonsense"), 2), (("doctor", "device=x"), 2)],
)
def test_an_error_leaves_standard_output_empty(words, code, tmp_path_factory):
    done = run_in_process(*words, "--json", cwd=tmp_path_factory.mktemp("empty"))
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ")


@pytest.mark.long
@each("text", HOSTILE)
def test_any_text_of_a_file_is_one_line_that_every_parser_reads(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    name = os.fsdecode(b"\xe9 run")
    make_run(folder / name, status="failed", reason=text, words=(f"model={text}",), events=[warning(text)])
    for words in (("runs", "."), ("report", name)):
        done = run_in_process(*words, "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
        json.dumps(parsed(done.stdout, words[0]), ensure_ascii=False).encode("utf-8")  # no lone surrogates


def test_secrets_are_masked(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "abcdefghijk")
    make_run(tmp_path / "a", status="failed", reason="no access with abcdefghijk")
    done = run_in_process("runs", ".", "--json", cwd=tmp_path)
    assert "abcdefghijk" not in done.stdout
    assert parsed(done.stdout, "runs")["runs"][0]["reason"] == "no access with ${oc.env:SOME_TOKEN}"


def test_the_page_has_every_exit_code_that_the_program_uses():
    own = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert own == {int(code) for code in re.findall(r"^\| (\d+) \|", PAGES["docs/programs.md"], re.MULTILINE)}
    everything = [errors.MptrainError]
    for kind in everything:
        everything += kind.__subclasses__()
    assert {kind.exit_code for kind in everything if "exit_code" in vars(kind)} <= own
