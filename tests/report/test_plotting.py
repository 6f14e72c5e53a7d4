import math
import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest

from mptrain.report.plotting import dashed_series, drawing, inlined, ordered_series, series, thousands, tick, ticks_at
from mptrain.system.words import elided, plain
from tests.loops import each
from tests.report.folders import HOSTILE


def sample(name="sample", text="a name"):
    with drawing(name, 2.5) as figure:
        (axes,) = figure.panels()
        figure.label(elided(text, 30), *axes.plot([1, 2, 3], [1.0, 3.0, 2.0], marker="o"))
        axes.set_title(elided(text, 40))
    return figure.svg


def test_a_figure_stands_for_itself():
    svg = sample()
    assert svg == sample()
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) == ids
    assert ids.isdisjoint(re.findall(r'\bid="([^"]+)"', sample("another")))
    assert "<style" not in svg
    assert "matplotlib" not in svg.lower().replace("http://matplotlib.org", "")
    assert not re.search(r"20\d\d-\d\d-\d\d", svg)
    element = inlined(svg)
    assert element.startswith("<svg ")
    assert "viewBox" in element
    assert not re.search(r'<svg[^>]* (width|height)="', element)


@pytest.mark.long
@each("text", [text for text in HOSTILE if text.strip()])
def test_whatever_a_name_contains_is_drawn_as_that_text(text):
    tree = ET.fromstring(sample(text=text))
    shown = ["".join(node.itertext()).strip() for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert elided(text, 40).strip() in shown
    assert {node.tag.rpartition("}")[2] for node in tree.iter()} <= {
        "svg", "metadata", "defs", "g", "path", "use", "text", "tspan", "clipPath", "rect", "RDF", "Work", "type",
    }  # fmt: skip


def test_drawing_neither_changes_nor_takes_settings_of_the_user():
    before = sample()
    with mpl.rc_context({"text.parse_math": True, "font.size": 40, "axes.facecolor": "red", "svg.fonttype": "path"}):
        kept = dict(mpl.rcParams)
        assert sample() == before
        assert dict(mpl.rcParams) == kept


def test_series_differ_and_ticks_are_short():
    assert [len(set(styles(28))) for styles in (series, dashed_series)] == [28, 28]
    assert len(set(ordered_series(26))) == 26
    assert [tick(value) for value in (0.05, -2.0, 12_000.0, 1e-5)] == ["0.05", "\u22122", "12k", "1e\u221205"]
    assert [thousands(value) for value in (400, 2_500_000, 0)] == ["400", "2.5M", "0"]


def test_curves_over_steps_keep_their_data_for_the_page():
    with drawing("kept", 2.5) as figure:
        assert repr(figure) == "<figure kept>"
        above, below = figure.panels(2)
        figure.line(above, "scale", ([1, 5], [65536.0, 8.0]), powers=True, color="red", drawstyle="steps-post")
        figure.line(above, "overflow", ([5], [8.0]), powers=True, color="#000000", marker="v", linestyle="none")
        above.set_ylabel("loss scale")
        across = below.get_xaxis_transform()
        figure.line(below, "lost", ([3], [0.97]), transform=across, marker="X", linestyle="none")
        figure.line(below, "mean", ([1, 2], [1.0, math.nan]), band=([0.5, 1], [2.0, 3]), linestyle="--", alpha=0.5)
        below.set_title("of runs")
        below.set_yscale("log")
    first, second = figure.charts
    assert (first.unit, first.log, first.rows, first.title) == ("loss scale", 2, (), "")
    assert [(one.name, one.kind, one.x, one.y, one.colour, one.marker) for one in first.series] == [
        ("scale", "stepped", (1, 5), (65536.0, 8.0), "#ff0000", "None"),
        ("overflow", "marks", (5,), (8.0,), "#000000", "v"),
    ]
    assert (second.title, second.log) == ("of runs", 10)
    lost, mean = second.series
    assert lost.kind == "steps"
    assert (mean.low, mean.high, mean.dash, mean.alpha) == ((0.5, 1), (2.0, 3), "--", 0.5)
    with drawing("rows", 2.5) as figure:
        (axes,) = figure.panels()
        figure.bars(axes, "skipped", ([1, 2], [0.0, 50.0]), 1)
        figure.name_rows(axes, ["a" * 40, "b"])
    (chart,) = figure.charts
    assert (len(chart.rows[0]), chart.rows[1], chart.series[0].kind) == (22, "b", "bars")
    assert not drawn_without_steps().charts


def drawn_without_steps():
    with drawing("other", 2.5) as figure:
        figure.panels()[0].plot([1, 2], [3, 4])
    return figure


@pytest.mark.parametrize(
    "name", ["a\x1b[2Jb", "\u202egnp", "x\x00y", "caf\udce9", "a\nb", "\u2028z", "<script>&\"'", "_under"]
)
def test_names_at_every_place_of_a_figure_are_text_without_control_characters(name):
    with drawing("f", 2.0) as figure:
        (axes,) = figure.panels()
        axes.plot([0, 1], [1, 2])
        axes.set_ylabel(name)
        axes.set_title(name, loc="left")
        figure.label(name, color="red")
        ticks_at(axes.xaxis, [0, 1], lambda _: name)
    shown = "".join(ET.fromstring(figure.svg).itertext())
    assert all(letter.isprintable() or letter == "\n" for letter in figure.svg)
    assert shown.count(plain(name)) >= (2 if "\n" in name else 5)
