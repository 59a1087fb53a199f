"""Pages of the documentation's site, for MkDocs.

The site has the folders of the repository, so that a link between two pages holds on both. MkDocs itself
knows ``docs/`` alone: this hook puts those pages below ``docs/``, and adds the pages of other folders, one of
the reference for each subpackage, and the files that pages link to, such as the YAML files of ``config/``. It
also fills in tables (``scripts/site_tables.py``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

from scripts.site_tables import with_tables

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
    sources = {page: None for page in pages}
    for page in pages:
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target.is_file() and target.is_relative_to(root):
                sources[target] = None
    site = [
        File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)) for path in sources
    ]
    names = [path.parent.name for path in (root / "torchrl_grpo").glob("*/__init__.py")]
    for name in (*names, "errors"):
        text = f"# {name}\n\n::: torchrl_grpo.{name}\n"
        site.append(File.generated(config, f"docs/api/{name}.md", content=text))
    theme = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(docs)]
    return Files([*theme, *site])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with its tables."""
    return with_tables(markdown)
