"""Pages of the documentation's site, for MkDocs.

The site has the folders of the repository, so that a link between two pages holds on both. MkDocs itself
knows ``docs/`` alone: this hook puts those pages below ``docs/``, and adds the pages of other folders and the
files that pages link to, such as the YAML files of ``config/``. It also fills in the tables of
``docs/coming_from.md``, whose rows error messages read from a file of the package.
"""

from __future__ import annotations

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
    """Return a text in which each line ``<!-- table: SECTION -->`` is the table of names of that section."""
    return _TABLE.sub(lambda marker: _table(marker[1]), markdown)


def _table(section: str) -> str:
    kind = "argument" if section == elsewhere.ARGUMENTS else "key"
    rows = [row for row in elsewhere.rows() if row.section == section]
    if not rows:
        raise ValueError(f"other_systems.tsv has no rows of {section}")
    cells = [(_codes(row.theirs), _codes(row.ours), row.differs) for row in rows]
    head = (f"their {kind}", f"our {kind}", "what differs")
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * 3, *cells))


def _codes(names: str) -> str:
    return names if names == "-" else ", ".join(f"`{name}`" for name in names.split(", "))
