"""Reports opened offline in headless Chromium, if it is installed."""

import struct

import pytest
from report.browser import CHROMIUM, visit
from report.folders import HOSTILE, make_comparison, make_run
from report.microscope import make_looked_at
from report.test_write_report import hostile_run

from mptrain.comparison.results import write_comparisons
from mptrain.report.report_files import write_report
from mptrain.runlog.sweeps import SweepPaths

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

#: Height in CSS pixels of the smallest letters of any figure.
SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll('figure svg text')].map(text => {
  const svg = text.ownerSVGElement;
  return parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
}))"""
#: Number of figures with text that extends beyond them.
CUT_TEXT = """[...document.querySelectorAll('figure svg')].filter(svg => {
  const whole = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].some(text => {
    const box = text.getBoundingClientRect();
    return box.left < whole.left - 1 || box.right > whole.right + 1 || box.bottom > whole.bottom + 1;
  });
}).length"""
PAGE_WIDTH = "document.documentElement.scrollWidth"
TEXT = "document.body.innerText"


def require_legible(page, width):
    """Open a page at a width in CSS pixels: no figure is cut or too small to read, and nothing else is asked for."""
    seen = visit(page, width, [PAGE_WIDTH, SMALLEST_TEXT, CUT_TEXT], picture=True)
    assert seen.requests == [page.resolve().as_uri()]
    assert seen.complaints == []
    page_width, smallest, cut = seen.answers
    assert page_width <= width
    assert smallest >= 9.5
    assert cut == 0
    assert struct.unpack(">I", seen.png[16:20])[0] == width


@pytest.mark.long
def test_pages_are_legible_and_ask_for_nothing(tmp_path):
    write_comparisons(SweepPaths(tmp_path).comparison, {"": make_comparison(tmp_path, seeds=2)})
    compared = write_report(tmp_path).html
    run = make_looked_at(tmp_path / "run", overflows={3: "calibrating", 30: "growth probe"})
    looked_at = write_report(run).html
    for width in (400, 1280):
        require_legible(compared, width)
        require_legible(looked_at, width)


def test_hostile_names_are_shown_and_do_nothing(tmp_path):
    page = write_report(hostile_run(tmp_path / "run")).html
    seen = visit(page, 400, [PAGE_WIDTH, TEXT, "document.title", "document.scripts.length"])
    assert seen.requests == [page.resolve().as_uri()]
    assert seen.complaints == []
    page_width, text, title, scripts = seen.answers
    assert scripts == 0
    assert page_width <= 400
    assert HOSTILE[0] in title
    assert HOSTILE[0] in text
    assert HOSTILE[3] in text


def test_a_page_that_was_tampered_with_loads_and_runs_nothing(tmp_path):
    page = write_report(make_run(tmp_path / "run")).html
    bad = '<script>document.title="run"</script><img src="https://example.invalid/x.png"></body>'
    page.write_text(page.read_text().replace("</body>", bad))
    seen = visit(page, 1280, ["document.title", "document.scripts.length"])
    assert seen.answers[0] != "run"
    assert seen.answers[1] == 1
    assert len([text for text in seen.complaints if "Content Security Policy" in text]) >= 2
