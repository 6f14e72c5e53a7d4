"""The values that a key can have, where its annotation lists them: read from our sources, which are not imported.

Importing them would import torch. Only what is written plainly is found: ``Literal``, ``bool``, unions of them, names
for them, and names imported from another of our modules.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]

#: Where the sections of a configuration say which dataclass checks them.
_SCHEMA = "mptrain.config.schema"

#: Names lead from module to module at most so often.
_DEPTH = 8


def choices_in_section(section: str, field: str) -> list[str]:
    """The values of a field of a section, ``[]`` where they are not a short list; ``""`` is the top of the tree."""
    for node in _module(_SCHEMA).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "SECTIONS":
            sections = node.value
            break
    else:
        return []
    name = "GeneralOptions" if not section else ""
    if isinstance(sections, ast.Dict):
        for key, value in zip(sections.keys, sections.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == section and isinstance(value, ast.Name):
                name = value.id
    return choices_of_target(f"{_SCHEMA}.{name}", field) if name else []


def choices_of_target(target: str, field: str) -> list[str]:
    """The values of a keyword of a class or function of ours by its dotted path, ``[]`` where they are not listed."""
    module, _, name = target.rpartition(".")
    found = _definition(module, name)
    if found is None:
        return []
    home, node = found
    if isinstance(node, ast.Name):  # another name of a class
        return choices_of_target(f"{home}.{node.id}", field)
    if isinstance(node, ast.ClassDef):
        annotation = _of_class(home, node, field)
    elif isinstance(node, ast.FunctionDef):
        annotation = _of_function(home, node, field)
    else:
        return []
    return list(dict.fromkeys(_values(*annotation, _DEPTH))) if annotation else []


def _of_function(module: str, node: ast.FunctionDef, field: str) -> tuple[str, ast.expr] | None:
    """The annotation of a parameter; of a function of options alone, of a field of the options."""
    arguments = [argument for argument in (*node.args.args, *node.args.kwonlyargs) if argument.annotation]
    for argument in arguments:
        if argument.arg == field and argument.annotation:
            return module, argument.annotation
    if [argument.arg for argument in arguments] == ["options"] and isinstance(arguments[0].annotation, ast.Name):
        found = _definition(module, arguments[0].annotation.id)
        if found and isinstance(found[1], ast.ClassDef):
            return _of_class(found[0], found[1], field)
    return None


def _of_class(module: str, node: ast.ClassDef, field: str) -> tuple[str, ast.expr] | None:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id == field:
            return module, item.annotation
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _of_function(module, item, field)
    for base in node.bases:
        found = _definition(module, base.id) if isinstance(base, ast.Name) else None
        if found and isinstance(found[1], ast.ClassDef) and (inherited := _of_class(found[0], found[1], field)):
            return inherited
    return None


def _values(module: str, node: ast.expr, depth: int) -> list[str]:
    """The values that an annotation allows."""
    if isinstance(node, ast.BinOp):
        return [*_values(module, node.left, depth), *_values(module, node.right, depth)]
    if isinstance(node, ast.Constant):
        return ["null"] if node.value is None else []
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if node.value.id == "Literal":
            return [_as_yaml(item.value) for item in inside if isinstance(item, ast.Constant)]
        return _values(module, inside[0], depth) if node.value.id == "Annotated" else []
    if isinstance(node, ast.Name):
        if node.id == "bool":
            return ["true", "false"]
        found = _definition(module, node.id) if depth else None
        if found and isinstance(found[1], ast.expr):
            return _values(found[0], found[1], depth - 1)
    return []


def _definition(module: str, name: str, depth: int = _DEPTH) -> tuple[str, ast.expr | ast.stmt] | None:
    """The class, function or value that a name stands for in a module, and the module that it is written in."""
    for node in _module(module).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() if node.name == name:
                return module, node
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return module, value
            case ast.ImportFrom(module=str(source), level=0) if depth:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return _definition(source, alias.name, depth - 1)
    return None


@lru_cache(maxsize=64)
def _module(name: str) -> ast.Module:
    """The syntax tree of a module of ours; an empty one for any other, and where it cannot be read."""
    path = _ROOT / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if name.split(".")[0] != "mptrain":
        return ast.Module([], [])
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
