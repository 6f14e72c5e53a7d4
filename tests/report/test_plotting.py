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


def test_the_same_figure_has_the_same_bytes():
    assert sample() == sample()


def test_figures_in_one_page_share_no_id():
    ids = [set(re.findall(r'\bid="([^"]+)"', sample(name))) for name in ("one", "two")]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_every_reference_leads_to_an_id_of_the_same_figure():
    svg = sample()
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) == set(re.findall(r'\bid="([^"]+)"', svg))


def test_nothing_says_when_or_by_what_it_was_drawn():
    svg = sample()
    assert "matplotlib" not in svg.lower().replace("http://matplotlib.org", "")
    assert not re.search(r"20\d\d-\d\d-\d\d", svg)


def test_no_style_reaches_beyond_the_figure():
    assert "<style" not in sample()


@each("text", [text for text in HOSTILE if text.strip()])
def test_whatever_a_name_contains_is_drawn_as_that_text(text):
    tree = ET.fromstring(sample(text=text))
    shown = ["".join(node.itertext()).strip() for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert elided(text, 40).strip() in shown
    assert {node.tag.rpartition("}")[2] for node in tree.iter()} <= {
        "svg", "metadata", "defs", "g", "path", "use", "text", "tspan", "clipPath", "rect", "RDF", "Work", "type",
    }  # fmt: skip


def test_an_inlined_figure_takes_the_width_it_is_given():
    element = inlined(sample())
    assert element.startswith("<svg ")
    assert "viewBox" in element
    assert not re.search(r'<svg[^>]* (width|height)="', element)


def test_drawing_leaves_settings_as_they_were_and_ignores_those_of_the_user():
    before = sample()
    with mpl.rc_context({"text.parse_math": True, "font.size": 40, "axes.facecolor": "red", "svg.fonttype": "path"}):
        kept = dict(mpl.rcParams)
        assert sample() == before
        assert dict(mpl.rcParams) == kept


def test_no_two_of_the_first_series_look_alike():
    assert len(set(series(28))) == 28
    assert len(set(dashed_series(28))) == 28
    assert len(set(ordered_series(26))) == 26


def test_ticks_are_short():
    assert [tick(value) for value in (0.05, -2.0, 12_000.0, 1e-5)] == ["0.05", "\u22122", "12k", "1e\u221205"]
    assert [thousands(value) for value in (400, 2_500_000, 0)] == ["400", "2.5M", "0"]
