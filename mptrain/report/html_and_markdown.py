"""Rendering of report pages as HTML and as Markdown. Only this module handles markup and escapes text.

Values reach the templates as plain text. The template environment escapes every value: markupsafe escapes HTML, and
`markdown` escapes Markdown so that names are shown literally.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mptrain import __version__
from mptrain.numerics.words import elided, plain
from mptrain.report.page import Page, Plot
from mptrain.report.plotting import inlined

TEMPLATES: Final = Path(__file__).parent / "templates"

#: Content security policy: the page loads nothing from elsewhere and runs no scripts.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"

#: Characters of one name or sentence at most. The middle of a longer text is left out.
MOST_LETTERS: Final = 1500


def html(page: Page) -> str:
    """Render a report page as one self-contained HTML document, without scripts and with all figures inside."""
    style = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    return _HTML.get_template("page.html.j2").render(page=page, style=style, policy=POLICY, version=__version__)


def markdown_page(page: Page, figures: str) -> str:
    """Render a report page as a Markdown document, whose figures (``NAME.svg``) are in a folder relative to it."""
    return _MARKDOWN.get_template("page.md.j2").render(page=page, figures=figures, version=__version__)


def _as_html(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    # A non-breaking space keeps a number and its unit on one line.
    return Markup(str(escape(elided(value, MOST_LETTERS))).replace(" %", "&nbsp;%"))


def _as_markdown(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(markdown(elided(value, MOST_LETTERS)))


def _svg(plot: Plot) -> Markup:
    return Markup(inlined(plot.svg))


def _path(text: str) -> Markup:
    return Markup(quote(os.fsencode(text)))


def _environment(finalize: Any, **filters: Any) -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(filters)
    return made


_HTML: Final = _environment(
    _as_html,
    svg=_svg,
    lines=lambda text: escape(plain(text, lines=True)),
    wav=lambda data: Markup("data:audio/wav;base64,") + base64.b64encode(data).decode(),
    png=lambda data: Markup("data:image/png;base64,") + base64.b64encode(data).decode(),
    path=_path,
)
_MARKDOWN: Final = _environment(
    _as_markdown, fenced=lambda text, language="": Markup(fenced(text, language)), path=_path
)


#: Characters that are special in Markdown, including its tables, mathematics and raw HTML.
_ENTITIES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL: Final = re.compile(r"[\\`*\[\]|~$!&<>]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_LINKS: Final = re.compile(r":(?=//)|(?<=www)\.|@", re.IGNORECASE)
_START: Final = re.compile(r"^([-+#=]|\d+[.)](?=\s|$))")


def markdown(text: object) -> str:
    """Escape a line of text so that Markdown shows it literally, both in a paragraph and in a table cell."""
    escaped = _SPECIAL.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), plain(text))
    escaped = _LINKS.sub(lambda found: f"&#{ord(found[0])};", escaped)
    return _START.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", escaped)


def fenced(text: object, language: str = "") -> str:
    """Return text as a fenced Markdown code block whose fence is longer than any run of backticks in the text."""
    code = plain(text, lines=True)
    longest = max((len(found) for found in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"
