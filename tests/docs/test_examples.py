"""The examples run, and show what they say."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import pytest
from PIL import Image

from tests.docs.pages import PAGES, ROOT
from tests.small_runs import environment

EXAMPLES = ROOT / "examples"


def code_cells(name):
    return [cell for cell in json.loads((EXAMPLES / name).read_text())["cells"] if cell["cell_type"] == "code"]


def executed(name):
    """Execute the cells of a notebook in order; return its variables, and what the cells show."""
    found, shown = {}, []
    for cell in code_cells(name):
        *body, last = ast.parse("".join(cell["source"])).body
        whole = [*body, *([] if isinstance(last, ast.Expr) else [last])]
        exec(compile(ast.Module(whole, []), "cell", "exec"), found)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), found))
    return found, shown


def output_of(script, *words, cwd):
    command = [sys.executable, str(EXAMPLES / script), *words]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_a_run_is_started_from_python(tmp_path):
    said = output_of("train.py", cwd=tmp_path)
    assert "step 1 overflowed at loss scale 16777216 and was skipped\n" in said
    assert float(re.search(r"^top1 (\S+)\n\Z", said, re.MULTILINE)[1]) > 0.8


@pytest.mark.long
def test_the_notebook_goes_from_training_to_a_prediction(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found, shown = executed("tour.ipynb")
    assert "<dd>done</dd>" in shown[0]._repr_html_()
    assert shown[1]._repr_svg_().startswith("<?xml")
    assert found["found"]["7.bias"] > 0
    said = capsys.readouterr().out
    assert re.search(r"^fp16_dynamic: top1 0\.\d+, (equivalent|undecided|better|worse): ", said, re.MULTILINE)
    assert shown[-1]["class"] == "0"


@pytest.mark.long
def test_the_notebook_of_python_shows_what_it_says(tmp_path, monkeypatch, capfd):
    for library in ("pandas", "onnx", "onnxruntime"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found, shown = executed("python.ipynb")
    assert [arm.word for arm in found["comparison"].arms] == ["reference", "equivalent"]
    # A run that was found done, ONNX Runtime's outputs, and the losses of the table in a file.
    assert [one for one in shown if isinstance(one, bool)] == [True, True, True]
    assert found["difference"] < 1e-4
    assert found["values"].summary["test"]["r2"] == pytest.approx(
        found["r2_score"](found["numbers"][700:], found["answers"]), rel=1e-6
    )
    assert found["stopped"].summary["stopped_early"] == "top1 above 0.75"
    assert found["stopped"].summary["epochs"] < 20
    assert found["named"].predict(found["x"][700])[0]["class"] in found["Rows"].classes
    assert (len(list(found["run"].steps())), len(list(found["longer"].steps()))) == (152, 152)
    said = capfd.readouterr().out
    assert "untouched: True\n" in said
    assert "trained in place: True\n" in said
    assert said.endswith("fix these rows, or drop them\n")


@pytest.mark.parametrize("name", ["tour.ipynb", "python.ipynb"])
def test_a_notebook_is_stored_without_outputs(name):
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells(name))


@pytest.mark.long
def test_masks_are_segmented_compared_and_drawn(tmp_path):
    script = "segmentation.py", "--pictures", "48", "--epochs", "2", "--seeds", "2"
    said = output_of(*script, cwd=tmp_path)
    assert re.search(r"^fp16_dynamic +2 .* (equivalent|undecided|better|worse)$", said, re.MULTILINE), said
    assert re.search(r"^test, 12 samples: loss .*, iou ", said, re.MULTILINE)
    with Image.open(tmp_path / said.splitlines()[-1].rpartition(": ")[2]) as sheet:
        assert sheet.size == (6 * 48, 3 * 48)


@pytest.mark.workload
def test_a_model_and_a_data_set_of_ones_own_train(tmp_path):
    said = output_of("own_parts.py", cwd=tmp_path)
    assert "net-parity-amp_bf16" in said
    assert float(re.search(r"^  top1 +(\S+) on test", said, re.MULTILINE)[1]) > 0.6


@pytest.mark.process
def test_a_watched_loop_names_skips_and_a_schedule_that_moved(tmp_path):
    said = output_of("watch.py", cwd=tmp_path)
    assert said.count("skipped=True") == said.count("kind='schedule_moved'") > 1
    assert "'2.bias'" in said
    assert len((tmp_path / "outputs/watched/steps.jsonl").read_text().splitlines()) == 100


def test_a_loop_that_is_examined_gets_the_report_that_is_shown(capsys):
    program, shown = re.search(
        r"```python\n(from collections.*?)```\n\n```\n(.*?)```", PAGES["docs/watch.md"], re.DOTALL
    ).groups()
    exec(program, {})
    said, expected = (re.sub(r"[\d.]+", "#", text) for text in (capsys.readouterr().out, shown))
    assert said == expected


@pytest.mark.workload
def test_a_comparison_reaches_a_verdict(tmp_path):
    reference, compared = output_of("compare.py", cwd=tmp_path).splitlines()[-2:]
    assert reference.startswith("fp32: reference: ")
    assert re.match("fp16_dynamic: (equivalent|undecided): the paired difference in top1 is ", compared)


def test_every_example_is_in_the_table():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert files == set(re.findall(r"\[(\w+\.\w+)\]\(", PAGES["examples/README.md"]))
