import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
from loops import each
from report.folders import HOSTILE

from mptrain.numerics.words import elided
from mptrain.report.plotting import dashed_series, drawing, inlined, ordered_series, series, thousands, tick


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
