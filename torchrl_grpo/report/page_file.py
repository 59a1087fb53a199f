"""Puts the data of runs, the page's code and its drawing library into one HTML file.

The browser runs the scripts of this file and nothing else: the page names their checksums in its Content
Security Policy, which also forbids every request. Data are JSON, in which ``<`` is escaped, and compressed
columns.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from torchrl_grpo.report import chart_library
from torchrl_grpo.runtime.package_versions import VERSION

_SCRIPTS = (
    "data.js",
    "table.js",
    "curves.js",
    "rollouts.js",
    "problems.js",
    "timeline.js",
    "overview.js",
    "differences.js",
    "main.js",
)
# Of zlib. Higher levels take several times as long for a few percent.
_LEVEL = 6


def render(
    runs: Sequence[Mapping[str, Any]],
    *,
    watched: bool = False,
    differences: Mapping[str, Any] | None = None,
) -> str:
    """Return the page.

    Args:
        runs: what :meth:`~torchrl_grpo.report.reader.RunReader.contents` returns, for each run.
        watched: whether the page comes from a server of this machine, and loads itself anew with new data.
        differences: what :func:`~torchrl_grpo.report.differences.compare` returns of several runs.
    """
    content = {
        "runs": [_packed(run) for run in runs],
        "differences": None if differences is None else _deflate(_encoded(differences)),
    }
    return fill("page.html", _SCRIPTS, content, watched=watched)


def fill(page: str, parts: Sequence[str], content: Mapping[str, Any], *, watched: bool = False) -> str:
    """Return a page with its code, its drawing library and its data.

    Args:
        page: name of the page among the files of ``page/``.
        parts: names of the files of its code.
        content: its data as JSON.
        watched: see :func:`render`.
    """
    library = chart_library.load()
    scripts = [library.script, _own_code(parts)]
    styles = [library.style, _page("page.css")]
    data = {"version": VERSION, "watched": watched, "missing": library.missing, **content}
    # This is the only character by which text could end the element that it is in.
    payload = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_sources(scripts)}",
            f"style-src {_sources(styles)}",
            f"connect-src {chr(39)}self{chr(39)}" if watched else "connect-src 'none'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    values = {
        "POLICY": policy,
        "LICENSE": chart_library.LICENSE,
        "STYLES": "".join(f"<style>{style}</style>\n" for style in styles),
        "DATA": payload,
        "SCRIPTS": "".join(f"<script>{script}</script>\n" for script in scripts),
    }
    # In one pass, so that nothing in a value is taken for a name.
    return re.sub(r"@@([A-Z]+)@@", lambda match: values[match[1]], _page(page))


def _sources(texts: Sequence[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


@cache
def _page(name: str) -> str:
    return files("torchrl_grpo.report").joinpath("page", name).read_text(encoding="utf-8")


def _own_code(names: Sequence[str]) -> str:
    parts = "\n".join(_page(name) for name in names)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


def _packed(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run as JSON, with its arrays and texts compressed."""
    packed = {name: _pack(value) for name, value in run.items() if name != "texts"}
    return {**packed, "texts": _deflate(_encoded(run["texts"]))}


def _encoded(texts: Any) -> bytes:
    # Half of a surrogate pair, which JSON can have, has no encoding.
    return json.dumps(texts, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _pack(value: Any) -> Any:
    if isinstance(value, array):
        if sys.byteorder == "big":
            value = array(value.typecode, value)
            value.byteswap()
        return {"type": value.typecode, "deflate": _deflate(value.tobytes())}
    if isinstance(value, Mapping):
        return {name: _pack(entry) for name, entry in value.items()}
    return value


def _deflate(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode()
