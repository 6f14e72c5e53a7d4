"""Measures of the size and structure of the code, as a table.

python -m tests.measure          # code and docstring lines, files, rooms, circles, the lines of a step; of the tests too
"""

from __future__ import annotations

import ast
import io
import token
import tokenize
from collections.abc import Iterator
from pathlib import Path

import grimp

from benchmarks.step_trace import USUAL, traced_step

ROOT = Path(__file__).resolve().parents[1]
_LAYOUT = (token.NEWLINE, token.NL, token.COMMENT, token.INDENT, token.DEDENT, token.ENDMARKER)


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that belong to docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node, clean=False
        ):
            found.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


def lines_of(file: Path) -> tuple[int, int]:
    """Return the number of code lines, without docstrings, comments and blank lines, and of docstring lines."""
    text = file.read_text(encoding="utf-8")
    docstrings = docstring_lines(ast.parse(text))
    code: set[int] = set()
    for part in tokenize.generate_tokens(io.StringIO(text).readline):
        if part.type not in _LAYOUT:
            code.update(range(part.start[0], part.end[0] + 1))
    return len(code - docstrings), len(docstrings)


def circles(package: str) -> Iterator[list[str]]:
    """Yield groups of modules that import one another, directly or through others, when they are executed."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    below = {module: graph.find_downstream_modules(module) for module in graph.modules}
    seen: set[str] = set()
    for module in sorted(graph.modules):
        group = sorted({module, *(other for other in below[module] if module in below[other])})
        if len(group) > 1 and module not in seen:
            seen.update(group)
            yield group


def main() -> None:
    """Print the table."""
    files = sorted((ROOT / "mptrain").rglob("*.py"))
    counted = [lines_of(file) for file in files]
    code, docstrings = (sum(column) for column in zip(*counted, strict=True))
    tests = sorted((ROOT / "tests").rglob("*.py"))
    rooms = [
        entry for entry in (ROOT / "mptrain").iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()
    ]
    step = traced_step(USUAL)
    found = list(circles("mptrain"))
    for name, value in (
        ("lines", f"{sum(len(file.read_text(encoding='utf-8').splitlines()) for file in files):,}"),
        ("code lines", f"{code:,}"),
        ("docstring lines / code lines", f"{docstrings / code:.2f}"),
        ("files", len(files)),
        ("rooms at the top", len(rooms)),
        ("import circles", len(found)),
        ("lines of tests", f"{sum(len(file.read_text(encoding='utf-8').splitlines()) for file in tests):,}"),
        ("a step in fp16_dynamic: files", len(step.lines)),
        ("a step in fp16_dynamic: lines", sum(map(len, step.lines.values()))),
        ("a step in fp16_dynamic: functions", len(step.functions)),
    ):
        print(f"{name:36}{value:>10}")
    for group in found:
        print("circle:", ", ".join(group))


if __name__ == "__main__":
    main()
