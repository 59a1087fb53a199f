"""Check that names of variables and arguments say what a thing is: ``found``, ``one`` and the like do not.

Each place that binds such a name is printed. The check fails if they are 2 or more of 1,000 bindings.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMPTY = frozenset({"found", "one", "asked", "told", "said", "wanted", "many", "given"})
LIMIT = 0.002

total, places = 0, []
for path in sorted((ROOT / "torchrl_grpo").rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        total += 1
        if name in EMPTY:
            places.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
print(*places, sep="\n", end="\n" if places else "")
sys.exit(int(len(places) >= LIMIT * total))
