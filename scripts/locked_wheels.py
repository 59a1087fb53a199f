"""Print where the files of a ``pylock.toml`` (PEP 751) are, one a line: ``locked_wheels.py FILE``.

Each package has its best wheel for this Python or, without one that fits, its source, of which ``pip wheel``
makes a wheel.
It is run with the Python of an environment that has pip.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import parse_wheel_filename


def name_of(file: dict[str, Any]) -> str:
    """Return the name of a file of the lock."""
    return str(file.get("name") or (file.get("url") or file["path"]).rpartition("/")[2].replace("%2B", "+"))


def main(lock: Path) -> None:
    """Print the files of a lock.

    Raises:
        SystemExit: a package has no file for this Python.
    """
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    for package in tomllib.loads(lock.read_text())["packages"]:
        wheels = []
        for wheel in package.get("wheels", []):
            fitting = [ranks[tag] for tag in parse_wheel_filename(name_of(wheel))[3] if tag in ranks]
            if fitting:
                wheels.append((min(fitting), name_of(wheel), wheel))
        file = min(wheels)[2] if wheels else package.get("sdist")
        if file is None:
            raise SystemExit(
                f"{package['name']} {package['version']}: no file for this Python; choose another"
            )
        place = file.get("url") or (lock.parent / file["path"]).resolve()
        sys.stdout.write(f"{place}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
