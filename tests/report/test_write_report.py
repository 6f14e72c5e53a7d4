import json
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from mptrain.report.html_and_markdown import write_report
from mptrain.runlog.sweeps import SweepPaths
from mptrain.study.comparison.results import write_comparisons
from mptrain.system.errors import StorageError
from mptrain.system.records import EventRecord
from tests.report.folders import CONFIG, HOSTILE, make_comparison, make_run, make_sweep, warning
from tests.report.policy import without_script
from tests.small_runs import environment


def hostile_run(path, **more):
    """Write a run with hostile text in every free-text field."""
    everything = " ".join(HOSTILE)
    note = json.dumps(everything.encode("utf-8", "ignore").decode())  # no parser of YAML takes half a character
    config = CONFIG.format(precision="fp32") + f"note: {note}\n"
    config = config.replace("model: mlp", f"model: {json.dumps(HOSTILE[0] + HOSTILE[8])}")
    events = [*(warning(text) for text in HOSTILE), EventRecord("resume", 3, {HOSTILE[1]: [HOSTILE[5]]})]
    run = {"learners": (HOSTILE[0], HOSTILE[7] + HOSTILE[5], "_hidden"), "overflows": {5: "unexpected", 9: "<b>"}}
    words = tuple(f"note={text}" for text in HOSTILE)
    return make_run(path, **{**run, "config": config, "events": events, "words": words, "reason": everything, **more})


def hostile_sweep(folder):
    points = [
        ((f"scaler.scale={2**at}", f"note={text}"), "done" if at % 3 else "failed", {"steps": 20} if at < 4 else None)
        for at, text in enumerate(HOSTILE)
    ]
    return make_sweep(folder, points, words=HOSTILE)


def hostile_comparison(folder):
    comparison = make_comparison(folder, arms=HOSTILE[:6], seeds=1, text=" ".join(HOSTILE))
    write_comparisons(SweepPaths(folder).comparison, {"": comparison})
    return folder


def test_a_report_is_two_documents_and_figures_always_the_same(tmp_path):
    path = make_run(tmp_path / "run", overflows={4: "calibrating"})
    written = write_report(path)
    assert (written.html, written.md) == (path / "report.html", path / "report.md")
    figures = [path / "figures" / f"{name}.svg" for name in ("loss", "metric", "loss-scale", "lr", "grad-norm")]
    for figure in figures:
        assert figure.read_text().startswith("<?xml")
        assert f"](figures/{figure.name})" in written.md.read_text()
    files = [written.html, written.md, figures[0]]
    before = [file.read_bytes() for file in files]
    write_report(path)
    assert [file.read_bytes() for file in files] == before


def test_a_folder_that_is_nothing_of_ours_is_named(tmp_path):
    with pytest.raises(StorageError, match="neither a run nor a sweep"):
        write_report(tmp_path)
    with pytest.raises(StorageError, match="no run directory"):
        write_report(tmp_path / "missing")


def test_a_folder_that_cannot_be_written_keeps_its_old_report(tmp_path, monkeypatch):
    path = make_run(tmp_path / "run")
    old = write_report(path).html.read_bytes()
    make_full = OSError(28, "No space left on device")

    def full(*_):
        raise make_full

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match="the disk is full"):
        write_report(path)
    monkeypatch.undo()
    assert (path / "report.html").read_bytes() == old
    assert not list(path.rglob("*.tmp"))


def test_nothing_is_written_where_a_link_leads(tmp_path):
    path = make_run(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (path / "figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"run/figures is a symbolic link"):
        write_report(path)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not (path / "report.html").exists()


def test_a_long_run_is_written_in_seconds_and_stays_small(tmp_path):
    overflows = dict.fromkeys(range(1, 2000, 5), "unexpected")
    path = make_run(tmp_path / "run", steps=2000, overflows=overflows, scale=2.0**900)
    record = path / "steps.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    with record.open("w") as file:  # ten times as long, and a spike
        for step in range(1, 20_001):
            fields = {**lines[(step - 1) % 2000], "step": step, "loss": 987654.0 if step == 13456 else 1.0}
            file.write(json.dumps(fields) + "\n")
    began = time.process_time()
    written = write_report(path)
    assert time.process_time() - began < 10
    assert written.html.stat().st_size < 2_000_000
    assert "20,000 steps" in written.html.read_text()


@pytest.mark.long
def test_reports_never_import_torch(tmp_path):
    run, sweep = make_run(tmp_path / "run"), make_sweep(tmp_path / "sweep", [(("seed=0",), "done", {})])
    compared = tmp_path / "compared"
    compared.mkdir()
    write_comparisons(SweepPaths(compared).comparison, {"": make_comparison(compared, seeds=1)})
    code = (
        "import sys, pathlib\n"
        "import mptrain.lab.pages.diagnosis_page, mptrain.report.run_blocks, mptrain.runlog.manifest\n"
        "from mptrain.report.html_and_markdown import write_report\n"
        "for folder in sys.argv[1:]: write_report(pathlib.Path(folder))\n"
        "print(sorted({'torch', 'matplotlib.pyplot', 'hydra'} & set(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(run), str(sweep), str(compared)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.fixture(scope="module", params=[hostile_run, hostile_sweep, hostile_comparison])
def hostile(request, tmp_path_factory):
    """Return the written report of a folder with hostile names."""
    return write_report(request.param(tmp_path_factory.mktemp("hostile") / "folder"))


def test_hostile_names_change_no_element_of_the_page(hostile):
    tags, attributes, text = set(), set(), []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.add(tag)
            attributes.update(name for name, _ in attrs)
            addresses = [value for name, value in attrs if name in ("href", "xlink:href", "src")]
            assert all(value.startswith(("#", "data:")) for value in addresses)

        def handle_data(self, data):
            text.append(data)

    page = without_script(hostile.html.read_text())
    Reader().feed(page)
    assert not tags & {"script", "b", "iframe", "object", "embed", "form", "base"}
    assert {"svg", "table"} <= tags
    assert not {name for name in attributes if name.startswith("on")}
    assert "<script>alert(1)</script>" in "".join(text)
    assert "{{ 7 * 7 }}" in "".join(text)
    assert not set("\u202e\x07\x1b\x00") & set(page)


def test_hostile_names_change_no_element_of_the_markdown(hostile):
    rendered = MarkdownIt("gfm-like", {"linkify": False}).enable("table").render(hostile.md.read_text())
    tags = set(re.findall(r"<(\w+)", rendered))
    allowed = {"h1", "h2", "p", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "strong", "img", "pre", "code"}
    assert tags <= allowed | {"details", "summary", "blockquote"}
    assert all(address.startswith("figures/") for address in re.findall(r'src="([^"]*)"', rendered))
    assert "href" not in rendered
    assert "|---" not in rendered
    for table in re.findall(r"<table>.*?</table>", rendered, re.DOTALL):
        widths = {len(re.findall(r"<t[dh]\b", row)) for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)}
        assert len(widths) == 1
