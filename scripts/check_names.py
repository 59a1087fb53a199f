"""Check that names say what a thing is: ``found``, ``one`` and the like do not.

Variables, arguments, attributes, functions and classes are checked. Each place that binds such a name is
printed, and a single place fails the check. Imports do not count, as others have chosen their names.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("torchrl_grpo", "tests", "benchmarks", "scripts", "examples", "sota-implementations")
EMPTY = frozenset({"found", "one", "asked", "told", "said", "wanted", "many", "given"})


def bindings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each binding."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.arg(lineno=line, arg=name)
                | ast.Name(lineno=line, id=name, ctx=ast.Store())
                | ast.Attribute(lineno=line, attr=name, ctx=ast.Store())
                | ast.FunctionDef(lineno=line, name=name)
                | ast.AsyncFunctionDef(lineno=line, name=name)
                | ast.ClassDef(lineno=line, name=name)
                | ast.ExceptHandler(lineno=line, name=str() as name)
                | ast.MatchAs(lineno=line, name=str() as name)
            ):
                yield line, name


places = [
    f"{path.relative_to(ROOT)}:{line}: {name}"
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    for line, name in bindings(ast.parse(path.read_text()))
    if name in EMPTY
]
sys.exit("\n".join(places) or None)
