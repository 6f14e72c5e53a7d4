import html
import re

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report.folders import HOSTILE

from mptrain.numerics.words import plain
from mptrain.report.html_and_markdown import fenced, markdown

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
