"""Hook of MkDocs that copies linked files of the repository outside docs/ beside the pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()((?:\.\./)+)((?:recipes|mptrain|benchmarks)/[^)#\s]+|README\.md)")


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to in other folders of the repository, under ``repository/``."""
    docs, seen = ROOT / "docs", set()
    for page in [*files.documentation_pages()]:
        for _, ups, target in LINK.findall((docs / page.src_uri).read_text(encoding="utf-8")):
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
        return match[1] + posixpath.relpath(f"repository/{path}", here or ".")

    return LINK.sub(moved, markdown)
