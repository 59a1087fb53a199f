"""Pictures of prompts, small enough for the page: data URLs within a bound on their size."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from torchrl_grpo.observe.pictures import read_reduced

# Pictures of one prompt that are shown, and those of a page.
_MOST, _MOST_OF_ALL = 16, 2_000
# As write_pictures() names files. No other name leads to a file.
_NAME = re.compile(r"[0-9a-f]{32}(\.[a-z]{3,4})?")


def names_of(value: Any) -> list[str]:
    """Return the names of files that a line of ``rollouts.jsonl`` gives as pictures."""
    names = value if isinstance(value, list) else []
    return [name for name in names if isinstance(name, str) and _NAME.fullmatch(name)][:_MOST]


class PictureUrls:
    """Data URLs of the pictures of a run, each made once.

    Args:
        run_dir: folder of the run.
        characters: number of characters that all of them may have.
    """

    def __init__(self, run_dir: Path, characters: int) -> None:
        self._run_dir = run_dir
        self._characters = characters
        self._known: dict[str, str | None] = {}

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the URLs of the first of these pictures, as many as there is room for."""
        urls: dict[str, str] = {}
        room = self._characters
        for name in islice(dict.fromkeys(names), _MOST_OF_ALL):
            if name not in self._known:
                self._known[name] = self._url(name)
            url = self._known[name]
            if url is None:
                continue
            room -= len(url)
            if room < 0:
                break
            urls[name] = url
        self._known = {name: url for name, url in self._known.items() if url is None or name in urls}
        return urls

    def _url(self, name: str) -> str | None:
        """Return a picture as a data URL; None if it is gone or damaged."""
        picture = read_reduced(self._run_dir, name)
        if picture is None:
            return None
        encoded = {}
        # Drawings are smaller as PNG, and photographs as JPEG.
        for kind in ("png", "jpeg"):
            buffer = io.BytesIO()
            picture.save(buffer, kind)
            encoded[kind] = buffer.getvalue()
        kind = min(encoded, key=lambda kind: len(encoded[kind]))
        return f"data:image/{kind};base64,{base64.b64encode(encoded[kind]).decode()}"
