"""Pages of the documentation's site, for MkDocs.

The site has the folders of the repository, so that a link between two pages holds on both. MkDocs itself
knows ``docs/`` alone: this hook puts those pages below ``docs/``, and adds the pages of other folders and the
files that pages link to, such as the YAML files of ``config/``. It also fills in tables whose rows stand in
the package: the names of other systems, which error messages read, and the schema of a batch.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

from torchrl_grpo.config import elsewhere

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

_PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/RESULTS.md",
    "benchmarks/MEASURED.md",
    "sota-implementations/grpo/README.md",
)
_LINK = re.compile(r"\]\(([^)\s#:]+)[)#]")
_TABLE = re.compile(r"^<!-- table: (.*) -->$", re.MULTILINE)
_SCHEMA = "torchrl_grpo/batch/schema.py"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the pages of ``docs/`` by those of the whole repository.

    Args:
        files: the files that MkDocs has found.
        config: its configuration.

    Returns:
        Pages, and the files that they link to, each under its path in the repository.
    """
    root = Path(config.config_file_path).parent.resolve()
    docs = Path(config.docs_dir).resolve()
    pages = [root / name for name in _PAGES] + sorted(docs.rglob("*.md"))
    found = {page: None for page in pages}
    for page in pages:
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target.is_file() and target.is_relative_to(root):
                found[target] = None
    site = [
        File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)) for path in found
    ]
    theme = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(docs)]
    return Files([*theme, *site])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with its tables."""
    return with_tables(markdown)


def with_tables(markdown: str) -> str:
    """Return a text with its tables.

    A line ``<!-- table: SECTION -->`` is the table of names of that section. With the path of the schema of a
    batch in place of the section it is the schema.
    """
    return _TABLE.sub(lambda marker: _schema() if marker[1] == _SCHEMA else _names(marker[1]), markdown)


def _names(section: str) -> str:
    kind = "argument" if section == elsewhere.ARGUMENTS else "key"
    rows = [row for row in elsewhere.rows() if row.section == section]
    if not rows:
        raise ValueError(f"other_systems.tsv has no rows of {section}")
    cells = [[_codes(row.theirs), _codes(row.ours), row.differs] for row in rows]
    return _markdown([[f"their {kind}", f"our {kind}", "what differs"], *cells])


def _schema() -> str:
    """Return the table of the module's docstring, whose rules of "=" show where the columns begin."""
    module = ast.parse((Path(__file__).resolve().parents[1] / _SCHEMA).read_text(encoding="utf-8"))
    lines = (ast.get_docstring(module) or "").splitlines()
    top, middle, bottom = (number for number, line in enumerate(lines) if line.startswith("="))
    starts = [rule.start() for rule in re.finditer("=+", lines[top])]
    rows: list[list[str]] = []
    for line in [lines[top + 1], *lines[middle + 1 : bottom]]:
        cells = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1][-1] += f" {cells[-1]}"
    head, *body = rows
    return _markdown([head, *([f"`{key}`", f"`{shape}`", *rest] for key, shape, *rest in body)])


def _codes(names: str) -> str:
    return names if names == "-" else ", ".join(f"`{name}`" for name in names.split(", "))


def _markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))
