"""Reports opened offline in headless Chromium, if it is installed."""

import csv
import json
import struct
import time

import pytest

from mptrain.report.html_and_markdown import write_page, write_report
from mptrain.report.page import Cell, Page, section, table
from mptrain.runlog.sweeps import SweepPaths
from mptrain.study.comparison.results import write_comparisons
from mptrain.study.pages.sweep_page import runs_page
from mptrain.system.words import MINUS, UNKNOWN
from tests.loops import each
from tests.report.browser import CHROMIUM, opened
from tests.report.folders import HOSTILE, make_comparison, make_run, make_sweep
from tests.report.microscope import make_looked_at
from tests.report.test_write_report import hostile_run

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

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
#: Waits until all visible figures have been drawn by the script.
DRAWN = """new Promise(done => (function look() {
  const all = [...document.querySelectorAll('figure[data-charts]')].filter(figure => figure.clientWidth);
  all.every(figure => figure.querySelector('canvas')) ? requestAnimationFrame(() => setTimeout(done, 50)) : setTimeout(look, 10);
})())"""
SETTLED = "new Promise(done => setTimeout(done, 100))"
STILL_SHOWN = "[...document.querySelectorAll('figure .still')].filter(one => one.clientHeight).length"
LIVE_SHOWN = "[...document.querySelectorAll('figure .live')].filter(one => one.clientHeight).length"
FIGURES = "document.querySelectorAll('figure').length"


def of(figure, selector):
    return f"""document.querySelector('figure[data-name="{figure}"] {selector}')"""


def legend(page, figure):
    """Return name and text of the visible rows of a figure's legend."""
    rows = of(figure, ".u-legend").replace("querySelector(", "querySelectorAll(").replace(".u-legend", ".u-series")
    texts = "[...row.cells].map(cell => cell.innerText.replace(/^[^\\x00-\\x7f]+/, '').trim())"
    return dict(page.evaluate(f"[...{rows}].filter(row => row.offsetHeight).map(row => {texts})"))


def plot_box(page, figure):
    """Return left, top, width and height of a figure's first plot area, after scrolling to it."""
    page.evaluate(of(figure, ".tools") + ".scrollIntoView()")
    box = "(box => [box.left, box.top, box.width, box.height])"
    return page.evaluate(f"{box}({of(figure, '.u-over')}.getBoundingClientRect())")


def click(page, element):
    page.evaluate(f"{element}.click()")
    page.evaluate(SETTLED)


def saved(folder, name):
    for _ in range(200):
        if (folder / name).exists():
            return (folder / name).read_bytes()
        time.sleep(0.05)
    raise AssertionError(f"{name} was not saved")


def spiked_run(path, steps=400):
    overflows = {3: "calibrating", 200: "growth probe", 300: "unexpected"}
    return make_run(path, steps=steps, overflows=overflows, loss=lambda step: 50.0 if step == 250 else 2 * 0.99**step)


@pytest.fixture(scope="module")
def run_report(tmp_path_factory):
    return write_report(spiked_run(tmp_path_factory.mktemp("spiked") / "run")).html


def require_legible(page, width):
    """Open a page at a width in CSS pixels: no figure is cut or too small to read, and nothing else is asked for."""
    with opened(page, width, scripts=False) as plain:
        page_width, smallest, cut = (plain.evaluate(question) for question in (PAGE_WIDTH, SMALLEST_TEXT, CUT_TEXT))
        assert page_width <= width
        assert smallest >= 9.5
        assert cut == 0
        assert plain.evaluate(STILL_SHOWN) == plain.evaluate(FIGURES)
        assert plain.evaluate(LIVE_SHOWN) == 0
    with opened(page, width) as seen:
        seen.evaluate(DRAWN)
        assert seen.evaluate(PAGE_WIDTH) <= width
        assert seen.evaluate(LIVE_SHOWN) > 0
        assert seen.evaluate(LIVE_SHOWN) + seen.evaluate(STILL_SHOWN) == seen.evaluate(FIGURES)
        assert seen.requests == [page.resolve().as_uri()]
        assert seen.complaints == []
        assert struct.unpack(">I", seen.screenshot()[16:20])[0] == width


def test_pages_are_legible_and_ask_for_nothing(tmp_path):
    write_comparisons(SweepPaths(tmp_path).comparison, {"": make_comparison(tmp_path, seeds=2)})
    compared = write_report(tmp_path).html
    run = make_looked_at(tmp_path / "run", overflows={3: "calibrating", 30: "growth probe"})
    looked_at = write_report(run).html
    for width in (400, 1280):
        require_legible(compared, width)
        require_legible(looked_at, width)


def test_the_mouse_shows_values_and_zooms(run_report):
    with opened(run_report, 1280) as page:
        page.evaluate(DRAWN)
        left, top, width, height = plot_box(page, "loss")
        page.mouse((left + 10, top + 10), (left + width * 250 / 400, top + height / 2))
        page.evaluate(SETTLED)
        shown = legend(page, "loss")
        assert abs(int(shown["step"]) - 250) <= 2
        assert float(shown["training loss, every step"].split()[0]) > 0
        page.mouse(
            (left + width * 0.5, top + 50), (left + width * 0.6, top + 60), (left + width * 0.75, top + 60), drag=True
        )
        page.evaluate(SETTLED)
        assert page.evaluate(of("loss", ".tools button:nth-child(2)") + ".hidden") is False
        page.mouse((left + 10, top + 10), (left + 1, top + height / 2))
        page.evaluate(SETTLED)
        assert abs(int(legend(page, "loss")["step"]) - 200) <= 3
        page.mouse((left + 50, top + 50), clicks=2)
        page.mouse((left + 10, top + 10), (left + width - 2, top + height / 2))
        page.evaluate(SETTLED)
        assert int(legend(page, "loss")["step"]) >= 398
        assert page.evaluate(of("loss", ".tools button:nth-child(2)") + ".hidden") is True
        assert page.complaints == []
        assert len(page.requests) == 1


def test_panels_of_a_figure_share_cursor_and_zoom(tmp_path):
    path = make_run(tmp_path / "gan", steps=200, learners=("critic", "artist"), overflows={50: "unexpected"})
    with opened(write_report(path).html, 1280) as page:
        page.evaluate(DRAWN)
        left, top, width, _ = plot_box(page, "loss-scale")
        page.mouse(
            (left + width / 2, top + 20), (left + width * 0.6, top + 20), (left + width - 1, top + 20), drag=True
        )
        page.mouse((left + 10, top + 10), (left + 2, top + 20))
        page.evaluate(SETTLED)
        steps = "[...document.querySelectorAll('figure[data-name=loss-scale] .u-series:first-child td')].map(one => one.innerText)"
        assert [abs(int(step) - 100) <= 2 for step in page.evaluate(steps)] == [True, True]


def test_switches_of_a_figure(run_report, tmp_path):
    with opened(run_report, 400, downloads=tmp_path) as page:
        page.evaluate(DRAWN)
        before = page.evaluate(of("loss", "canvas") + ".toDataURL()")
        log = of("loss", ".tools button")
        pressed = page.evaluate(log + ".ariaPressed")
        click(page, log)
        linear = page.evaluate(of("loss", "canvas") + ".toDataURL()")
        assert page.evaluate(log + ".ariaPressed") != pressed
        assert linear != before
        click(page, of("loss", ".u-series:nth-child(2) th"))
        assert page.evaluate(of("loss", ".u-series:nth-child(2)") + ".classList.contains('u-off')")
        hidden = page.evaluate(of("loss", "canvas") + ".toDataURL()")
        assert hidden != linear
        click(page, log)
        assert page.evaluate(of("loss", ".u-series:nth-child(2)") + ".classList.contains('u-off')")
        click(page, of("loss", ".tools button:nth-child(3)"))
        click(page, of("loss", ".tools button:nth-child(4)"))
        assert saved(tmp_path, "loss.png").startswith(b"\x89PNG")
        assert page.evaluate(TEXT).count("log y") > 0
        assert page.complaints == []
    head, *rows = csv.reader(saved(tmp_path, "loss.csv").decode().splitlines())
    assert head == ["step", "training loss, every step", "training loss, moving mean", "validation loss"]
    values = {int(row[0]): row[1:] for row in rows}
    assert list(values) == list(range(1, 401))
    assert float(values[250][0]) == 50.0
    assert float(values[100][0]) == pytest.approx(2 * 0.99**100, rel=1e-8)
    assert [step for step, row in values.items() if row[2]] == list(range(20, 401, 20))


def test_values_that_a_logarithmic_axis_cannot_show_are_counted(tmp_path):
    path = make_run(tmp_path / "run", loss=lambda step: 0.0 if step in (7, 9) else 1.0 / step)
    with opened(write_report(path).html, 1280) as page:
        page.evaluate(DRAWN)
        note = of("loss", ".live > .note")
        assert page.evaluate(note + ".hidden") is True
        click(page, of("loss", ".tools button"))
        assert page.evaluate(note + ".innerText").startswith("2 values of 0 or less are not on")


def test_tables_are_sorted_and_filtered(tmp_path):
    points = [
        ((f"scaler.scale={2**at}", f"optimizer.lr={rate}"), "done" if at else "failed", {"steps": 5, "metric": at / 20})
        for at, rate in enumerate(["1e-3", "0.5", "2e-10", "30"] * 4 + ["7"])
    ]
    path = make_sweep(tmp_path / "sweep", points)
    column = "[...document.querySelectorAll('.scroll tbody tr')].filter(row => !row.hidden).map(row => row.cells[{}].innerText)"
    with opened(write_report(path).html, 1280) as page:
        heads = page.evaluate("[...document.querySelectorAll('thead th')].map(head => head.innerText)")
        rate, metric = heads.index("optimizer.lr"), heads.index("top1 (test)")
        order = page.evaluate(column.format(0))
        click(page, f"document.querySelectorAll('thead button')[{rate}]")
        rates = [float(text) for text in page.evaluate(column.format(rate))]
        assert rates == sorted(rates)
        click(page, f"document.querySelectorAll('thead button')[{metric}]")
        click(page, f"document.querySelectorAll('thead button')[{metric}]")
        metrics = page.evaluate(column.format(metric))
        assert metrics[-1] == UNKNOWN
        assert [float(text) for text in metrics[:-1]] == sorted(map(float, metrics[:-1]), reverse=True)
        assert page.evaluate(f"document.querySelectorAll('thead th')[{metric}].ariaSort") == "descending"
        click(page, f"document.querySelectorAll('thead button')[{metric}]")
        assert page.evaluate(column.format(0)) == order
        page.evaluate("(box => { box.value = '2e-10'; box.oninput() })(document.querySelector('input'))")
        assert set(page.evaluate(column.format(rate))) == {"2e-10"}
        assert page.evaluate("document.querySelector('.filter').innerText").strip() == "4 of 17 rows"
        assert page.complaints == []


@each(
    ("one", "other"),
    [
        ("12:05", "3:00:10"),
        ("812 B", "4.2 kB"),
        ("999.9 MB", "1.0 GB"),
        ("512", "2^10"),
        (f"{MINUS}3.5", "0.4 %"),
        ("9,999", "12,345"),
    ],
)
def test_cells_are_sorted_by_the_numbers_that_they_show(tmp_path, one, other):
    rows = table(("value",), [[other], [one], [UNKNOWN]], numeric=(0,))
    page = write_page(
        Page("", "sorted", Cell(""), "", (section("All", rows),)), tmp_path, tmp_path / "a.html", tmp_path / "a.md"
    )
    with opened(page.html, 400) as seen:
        click(seen, "document.querySelector('thead button')")
        cells = seen.evaluate(
            "[...document.querySelectorAll('td')].map(cell => cell.innerText.replace('\\u00a0', ' '))"
        )
        assert cells == [one, other, UNKNOWN]
        assert seen.evaluate("typeof uPlot") == "undefined"


def test_the_page_is_dark_where_the_reader_wants_it_and_printed_as_drawn(run_report):
    paper = "getComputedStyle(document.body).backgroundColor"
    turned = f"getComputedStyle({of('loss', 'canvas')}).filter"
    with opened(run_report, 1280, dark=True) as page:
        page.evaluate(DRAWN)
        assert page.evaluate(paper) == "rgb(18, 18, 18)"
        assert "invert" in page.evaluate(turned)
        click(page, "document.querySelector('button.theme')")
        assert page.evaluate(paper) == "rgb(255, 255, 255)"
        assert page.evaluate(turned) == "none"
        page.media(dark=False)
        click(page, "document.querySelector('button.theme')")
        assert page.evaluate(paper) == "rgb(18, 18, 18)"
        page.media(dark=True, printed=True)
        assert page.evaluate(paper) == "rgb(255, 255, 255)"
        assert page.evaluate(LIVE_SHOWN) == 0
        assert page.evaluate(STILL_SHOWN) == page.evaluate(FIGURES)
        assert page.evaluate("getComputedStyle(document.querySelector('figure svg')).filter") == "none"
        assert page.complaints == []


def test_several_runs_are_in_the_same_figures(tmp_path):
    runs = [make_run(tmp_path / f"run{rate}", words=("model=mlp", f"optimizer.lr={rate}")) for rate in (0.1, 0.2)]
    folder = tmp_path / "together"
    folder.mkdir()
    written = write_page(runs_page(runs), folder, folder / "report.html", folder / "report.md")
    with opened(written.html, 1280) as page:
        page.evaluate(DRAWN)
        assert list(legend(page, "losses")) == ["step", "lr=0.1", "lr=0.2"]
        assert list(legend(page, "scales")) == ["step", "lr=0.1", "lr=0.2"]
        assert page.complaints == []
        assert len(page.requests) == 1


def test_a_page_that_is_followed_reloads_itself_but_not_while_it_is_read(tmp_path):
    path = spiked_run(tmp_path / "run", steps=80)
    page_file = write_report(path, reload=1).html
    title = "document.title"
    with opened(page_file, 1280) as page:
        page.evaluate(DRAWN)
        left, top, width, _ = plot_box(page, "loss")
        page.mouse(
            (left + width * 0.5, top + 20), (left + width * 0.6, top + 20), (left + width - 1, top + 20), drag=True
        )
        page.mouse((5, 5))
        page_file.write_text(page_file.read_text().replace("<title>", "<title>newer "))
        time.sleep(2.2)
        assert len(page.requests) == 1
        assert not page.evaluate(title).startswith("newer")
        click(page, of("loss", ".tools button:nth-child(2)"))
        page.wait_for_load()
        assert page.evaluate(title).startswith("newer")
        assert set(page.requests) == {page_file.resolve().as_uri()}
        assert page.complaints == []
    with opened(page_file, 1280, scripts=False) as page:
        page.wait_for_load()  # by the meta element
        assert page.evaluate(title).startswith("newer")


def test_hostile_names_are_shown_and_do_nothing(tmp_path):
    page_file = write_report(hostile_run(tmp_path / "run", steps=120)).html
    with opened(page_file, 400, downloads=tmp_path) as page:
        page.evaluate(DRAWN)
        assert page.evaluate("document.scripts.length") == 1
        assert page.evaluate(PAGE_WIDTH) <= 400
        assert HOSTILE[0] in page.evaluate("document.title")
        assert HOSTILE[0] in page.evaluate(TEXT)
        assert HOSTILE[3] in page.evaluate(TEXT)
        assert any(HOSTILE[0] in name for name in legend(page, "loss"))
        click(page, of("lr", ".tools button:nth-child(4)"))
        assert page.requests == [page_file.resolve().as_uri()]
        assert page.complaints == []
    assert b"<script>alert(1)</script>" in saved(tmp_path, "lr.csv")


def test_a_page_that_was_tampered_with_loads_and_runs_nothing(tmp_path):
    page_file = write_report(make_run(tmp_path / "run")).html
    bad = (
        '<script>document.title="run"</script><img src="https://example.invalid/x.png" onerror="document.title=\'run\'">'
        '<iframe src="data:text/html,x"></iframe></body>'
    )
    page_file.write_text(page_file.read_text().replace("</body>", bad))
    with opened(page_file, 1280) as page:
        page.evaluate(DRAWN)
        assert page.evaluate("document.title") != "run"
        assert page.evaluate("document.scripts.length") == 2
        assert len([text for text in page.complaints if "Content Security Policy" in text]) >= 3


@pytest.mark.slow
def test_a_run_of_many_steps_has_a_small_page_that_answers_soon_and_keeps_its_spike(tmp_path):
    path = make_run(tmp_path / "run", steps=2000, overflows={9: "unexpected"})
    record = path / "steps.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    with record.open("w") as file:
        for step in range(1, 200_001):
            fields = {**lines[(step - 1) % 2000], "step": step, "loss": 987654.0 if step == 134567 else 1 + step % 7}
            file.write(json.dumps(fields) + "\n")
    written = write_report(path)
    assert written.html.stat().st_size < 3_000_000
    loss = next(plot for plot in written.page.plots() if plot.name == "loss")
    assert "lowest and highest of every 256 steps, so that no spike is lost" in loss.caption
    began = time.perf_counter()
    with opened(written.html, 1280) as page:
        page.evaluate(DRAWN)
        assert time.perf_counter() - began < 20  # with the start of the browser, on a busy machine
        assert page.evaluate("performance.now()") < 10_000
        left, top, width, height = plot_box(page, "loss")
        at = left + width * 134_567 / 200_000
        page.mouse((at - 9, top + 20), (at, top + 20), (at + 9, top + 20), drag=True)
        page.evaluate(SETTLED)
        found = []
        for pixel in range(int(width)):  # one of them is the nearest to the spike
            page.mouse((left + pixel, top + height / 2))
            found.append(" ".join(legend(page, "loss").values()))
        assert any("134,567 987,654" in text for text in found)
