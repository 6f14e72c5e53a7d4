import html
import json
import math
import re

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from mptrain.report.html_and_markdown import MOST_LETTERS, UPLOT, fenced, markdown, markdown_page
from mptrain.report.html_and_markdown import html as page_html
from mptrain.report.page import Cell, Chart, Page, Plot, Series, plots, section
from mptrain.system.words import elided, plain
from tests.report.folders import HOSTILE
from tests.report.policy import without_script

READER = MarkdownIt("gfm-like", {"linkify": False}).enable("table")

NASTY = st.text(alphabet=st.sampled_from("\\`*_{}[]()#+-.!|<>~&$:/@ \n\t=1aA\"'\u202e\x00"), max_size=30)


def words_of(rendered):
    return html.unescape(re.sub(r"<[^>]*>", "", rendered)).strip("\n")


@given(st.one_of(NASTY, st.sampled_from(HOSTILE)))
def test_a_paragraph_shows_exactly_the_text(text):
    rendered = READER.render(markdown(text))
    assert re.sub(r"</?p>", "", rendered).count("<") == 0
    assert words_of(rendered) == plain(text)


@given(st.one_of(NASTY, st.sampled_from(HOSTILE)))
def test_a_cell_of_a_table_shows_the_text_and_stays_one_cell(text):
    rendered = READER.render(f"| a | b |\n|---|---|\n| {markdown(text)} | end |\n")
    cells = re.findall(r"<td>(.*?)</td>", rendered, re.DOTALL)
    assert [words_of(cell) for cell in cells] == [plain(text), "end"]
    assert all("<" not in cell for cell in cells)


@given(st.one_of(NASTY, st.sampled_from(HOSTILE)))
def test_no_text_gets_out_of_a_fence(text):
    rendered = READER.render(f"{fenced(text, 'yaml')}\n\nafter\n")
    assert rendered.startswith('<pre><code class="language-yaml">')
    assert rendered.endswith("</code></pre>\n<p>after</p>\n")
    assert rendered.count("<") == 6


def test_names_stay_readable_and_addresses_do_not_become_links():
    assert READER.render(f"a {markdown('<b')} > b") == "<p>a &lt;b &gt; b</p>\n"  # closed by the page behind it
    assert markdown("amp_dynamic scaler.init_scale=65536") == "amp_dynamic scaler.init_scale=65536"
    text = markdown("https://example.invalid www.example.invalid a@example.invalid")
    assert not [one for one in ("https:", "www.", "@") if one in text]


def test_the_data_of_a_figure_are_an_attribute_that_no_text_leaves():
    series = [Series(text, (1.0, 2.5), (math.nan, 1 / 3), "#000000") for text in HOSTILE] + [
        Series("scale", (1,), (2.0**60,), "#000000", low=(math.inf,), high=(1e-45,))
    ]
    plot = Plot("loss", "Loss.", "<svg></svg>", (Chart(HOSTILE[0], HOSTILE[2], 10, (HOSTILE[1],), tuple(series)),))
    page = Page("", "t", Cell(""), "", (section("s", plots(plot)),))
    text = without_script(page_html(page))
    (data,) = re.findall(r'<figure data-name="loss" data-charts="([^"]*)">', text)
    (chart,) = json.loads(html.unescape(data))
    assert "<" not in data
    assert [one["name"] for one in chart["series"]] == [*(elided(text, MOST_LETTERS) for text in HOSTILE), "scale"]
    assert (chart["title"], chart["unit"], chart["rows"]) == (plain(HOSTILE[0]), plain(HOSTILE[2]), [plain(HOSTILE[1])])
    assert chart["series"][0]["y"] == [None, 0.333333333]
    assert (chart["series"][-1]["y"], chart["series"][-1]["low"], chart["series"][-1]["high"]) == (
        [2**60],
        [None],
        [1e-45],
    )
    assert HOSTILE[0] not in markdown_page(page, "figures")


def test_only_pages_with_curves_carry_the_program_that_draws_them():
    still = Plot("forest", "Differences.", "<svg></svg>")
    page = page_html(Page("", "t", Cell(""), "", (section("s", plots(still)),)))
    without_script(page)
    assert "uPlot (v" not in page
    assert "data-charts=" not in without_script(page)
    assert "MIT" in (UPLOT / "LICENSE").read_text()


def test_only_the_page_of_a_running_run_reloads_itself():
    page = Page("", "t", Cell("running"), "", ())
    assert 'http-equiv="refresh"' not in page_html(page)
    assert '<noscript><meta http-equiv="refresh" content="7"></noscript>' in page_html(page, reload=7)
    assert "reloads every 7 seconds" in page_html(page, reload=7)
