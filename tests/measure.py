"""Measures of the size and structure of the code, as a table.

python -m tests.measure          # size, packages and their imports, small files, words of a dialect, the lines of a step
"""

from __future__ import annotations

import ast
import io
import token
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

from benchmarks.step_trace import USUAL, traced_step

ROOT = Path(__file__).resolve().parents[1]
_LAYOUT = (token.NEWLINE, token.NL, token.COMMENT, token.INDENT, token.DEDENT, token.ENDMARKER)


#: Code lines below which a file is small.
SMALL = 60

#: Names that say nothing of what they hold.
DIALECT = ("one", "found", "place", "said", "told")


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


def arrows(package: str) -> set[tuple[str, str]]:
    """Return the pairs of packages of which the first imports the second, for types too."""
    graph = grimp.build_graph(package, cache_dir=None)
    tops = {module: ".".join(module.split(".")[:2]) for module in graph.modules}
    packages = {top for module, top in tops.items() if module != top}  # a package has modules of its own
    return {
        (tops[module], tops[other])
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
        if tops[module] != tops[other] and {tops[module], tops[other]} <= packages
    }


def names(files: Iterable[Path]) -> Counter[str]:
    """Count the names of variables, arguments and attributes in the syntax trees of files."""
    counted: Counter[str] = Counter()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
            counted.update([name] if isinstance(name, str) else [])
    return counted


def import_lines(file: Path) -> int:
    """Return the number of lines of import statements, wherever they stand."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)


def is_extension_point(file: Path) -> bool:
    """Return whether a file is one of those that hold one part each: a scaler, a schedule, a model, a data set, a tracker."""
    return file.parent.name in ("models", "datasets", "scaler", "schedule", "logger")


def main() -> None:
    """Print the table."""
    files = sorted((ROOT / "mptrain").rglob("*.py"))
    counted = [lines_of(file) for file in files]
    code, docstrings = (sum(column) for column in zip(*counted, strict=True))
    tests = sorted((ROOT / "tests").rglob("*.py"))
    rooms = [entry for entry in (ROOT / "mptrain").iterdir() if (entry / "__init__.py").exists()]
    step = traced_step(USUAL)
    found = list(circles("mptrain"))
    raw = [len(file.read_text(encoding="utf-8").splitlines()) for file in files]
    small = [
        file
        for file, (lines, _) in zip(files, counted, strict=True)
        if lines < SMALL and file.name != "__init__.py" and not is_extension_point(file)
    ]
    words = names(files)
    for name, value in (
        ("lines", f"{sum(len(file.read_text(encoding='utf-8').splitlines()) for file in files):,}"),
        ("code lines", f"{code:,}"),
        ("docstring lines / code lines", f"{docstrings / code:.2f}"),
        ("files", len(files)),
        ("code lines per file", f"{code / len(files):.0f}"),
        ("imports, share of code", f"{sum(map(import_lines, files)) / code:.1%}"),
        ("longest file, raw lines", max(raw)),
        (f"files below {SMALL} code lines, but __init__ and extension points", len(small)),
        ("packages", len(rooms)),
        ("arrows between packages", len(arrows("mptrain"))),
        (f"names {', '.join(DIALECT)}", sum(words[word] for word in DIALECT)),
        ("import circles", len(found)),
        ("lines of tests", f"{sum(len(file.read_text(encoding='utf-8').splitlines()) for file in tests):,}"),
        ("a step in fp16_dynamic: files", len(step.lines)),
        ("a step in fp16_dynamic: lines", sum(map(len, step.lines.values()))),
        ("a step in fp16_dynamic: functions", len(step.functions)),
    ):
        print(f"{name:66}{value:>10}")
    for group in found:
        print("circle:", ", ".join(group))


if __name__ == "__main__":
    main()
