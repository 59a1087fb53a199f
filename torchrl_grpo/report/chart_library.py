"""The drawing library of the page: uPlot, which comes with the package ``youplot``.

Only its two files are read. Nothing of that package is imported.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from typing import NamedTuple

PACKAGE = "youplot"
LICENSE = "uPlot 1.6.31, Copyright (c) Leon Sorokin, MIT License, github.com/leeoniya/uPlot"
# Of the files that uPlot 1.6.31 itself publishes. Other content must not get into a page that people open.
_SHA256 = {
    "uplot.iife.min.js": "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",
    "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


class ChartLibrary(NamedTuple):
    """Code and style of the library; both empty, and why, if it cannot be used."""

    script: str
    style: str
    missing: str


def load() -> ChartLibrary:
    """Return the library."""
    try:
        package = distribution(PACKAGE)
        content = [
            (name, str(package.locate_file(f"youplot/vendor/{name}")))
            for name in ("uplot.iife.min.js", "uplot.min.css")
        ]
        texts = []
        for name, path in content:
            with open(path, "rb") as file:
                data = file.read()
            if hashlib.sha256(data).hexdigest() != _SHA256[name]:
                return _missing(f"the package {PACKAGE} {package.version} has another uPlot than 1.6.31")
            texts.append(data.decode())
    except PackageNotFoundError:
        return _missing(f"the package {PACKAGE} is not installed")
    except OSError as error:
        return _missing(f"the package {PACKAGE} is incomplete: {error}")
    return ChartLibrary(texts[0], texts[1], "")


def _missing(why: str) -> ChartLibrary:
    return ChartLibrary(
        "", "", f"Curves are missing: {why}. Run pip install {PACKAGE}==1.0.0 and write the report again."
    )
