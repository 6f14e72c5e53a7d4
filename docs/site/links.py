"""Hook of MkDocs: the site has pages of the root, and copies of other linked files of the repository outside docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # of the root, where forges look for them
FOLDERS = "(?:recipes|mptrain|benchmarks|examples)/"
LINK = re.compile(rf"(\]\()((?:\.\./)+)({FOLDERS}[^)#\s]+|README\.md|{'|'.join(PAGES)})")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root as if they were in docs/, and what pages link to elsewhere under ``repository/``."""
    docs, seen = ROOT / "docs", set(PAGES)
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=re.sub(rf"\]\((?={FOLDERS})", "](../", text)))
    for page in [*files.documentation_pages()]:
        for _, ups, target in LINK.findall(page.content_string):
            path = (docs / page.src_uri).parent / (ups + target)
            if path.is_file() and not path.resolve().is_relative_to(docs) and target not in seen:
                seen.add(target)
                text = path.read_text(encoding="utf-8")
                if path.suffix == ".md":  # as text: what such a page links to is not here
                    text = re.sub(r"(!?)\[([^\]]*)\]\((?!https://)[^)]*\)", r"\2", text)
                files.append(File.generated(config, f"repository/{target}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links that leave docs/ to those copies."""
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", here, match[2] + match[3]))
        if path.startswith("docs/"):
            return match[0]
        path = path if path in PAGES else f"repository/{path}"
        return match[1] + posixpath.relpath(path, here or ".")

    return LINK.sub(moved, markdown)
