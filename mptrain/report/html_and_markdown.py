"""Pages as HTML and as Markdown. The one module that knows of markup, and the one that makes text safe.

Values reach the templates as text and are escaped there, each of them, by the environment itself: for HTML by markupsafe,
for Markdown so that a name stays a name whatever it contains.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mptrain import __version__
from mptrain.report.formatting import elided, plain
from mptrain.report.page import Page, Plot
from mptrain.report.plotting import inlined

TEMPLATES: Final = Path(__file__).parent / "templates"

#: Nothing is loaded from anywhere, and nothing runs.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"

#: Of one name or sentence; what has more is shown with its middle left out.
MOST_LETTERS: Final = 1500


def html(page: Page) -> str:
    """The page as one self-contained HTML document."""
    style = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    return _HTML.get_template("page.html.j2").render(page=page, style=style, policy=POLICY, version=__version__)


def markdown_page(page: Page, figures: str) -> str:
    """The page as Markdown.

    Args:
        page: The page.
        figures: The folder of its figures, relative to the document.
    """
    return _MARKDOWN.get_template("page.md.j2").render(page=page, figures=figures, version=__version__)


def _as_html(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    return Markup(
        str(escape(elided(value, MOST_LETTERS))).replace(" %", "&nbsp;%")
    )  # a number is not parted from its unit


def _as_markdown(value: Any) -> Markup:
    return value if isinstance(value, Markup) else Markup(markdown(elided(value, MOST_LETTERS)))


def _svg(plot: Plot) -> Markup:
    return Markup(inlined(plot.svg))


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
)
_MARKDOWN: Final = _environment(
    _as_markdown, fenced=lambda text, language="": Markup(fenced(text, language)), path=lambda text: Markup(quote(text))
)


#: What Markdown, its tables, its mathematics and its raw HTML react to.
_ENTITIES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL: Final = re.compile(r"[\\`*\[\]|~$!&<>]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_LINKS: Final = re.compile(r":(?=//)|(?<=www)\.|@", re.IGNORECASE)
_START: Final = re.compile(r"^([-+#=]|\d+[.)](?=\s|$))")


def markdown(text: object) -> str:
    """A line of text that every Markdown reader shows as it is, in a paragraph and in a cell of a table alike."""
    escaped = _SPECIAL.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), plain(text))
    escaped = _LINKS.sub(lambda found: f"&#{ord(found[0])};", escaped)
    return _START.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", escaped)


def fenced(text: object, language: str = "") -> str:
    """A block of code inside a fence that no line of the text can close."""
    code = plain(text, lines=True)
    longest = max((len(found) for found in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"
