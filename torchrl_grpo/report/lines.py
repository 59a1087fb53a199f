"""Reads JSON lines of a file that grows, each once. A damaged line is counted and skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrl_grpo.runtime.files.shared_files import open_regular

# A longer line is damaged, and is never in memory as a whole.
_LONGEST = 64 * 2**20
# Bytes at the end of the last line by which a file that was cut and has grown again is found out.
_REMEMBERED = 4096


class GrowingFile:
    """A file of JSON lines.

    Args:
        path: the file, which need not exist.

    Attributes:
        damaged: number of lines that are no JSON object with a step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._offset = 0
        self._last = b""
        self._step: int | None = None

    def was_cut(self) -> bool:
        """Whether the last line that was read is gone or another one, as after a resumption."""
        if not self.path.exists():
            return False
        with os.fdopen(open_regular(self.path), "rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                return True
            file.seek(self._offset - len(self._last))
            return file.read(len(self._last)) != self._last

    def new_lines(self, skip_falls: bool = False) -> Iterator[dict[str, Any]]:
        """Return the complete lines since the last call.

        Args:
            skip_falls: whether a line of an earlier step than the one before is damaged.

        Raises:
            LinesRepeated: a step is earlier than the one before. The file was cut and has grown again.
        """
        if not self.path.exists():
            return
        with os.fdopen(open_regular(self.path), "rb") as file:
            file.seek(self._offset)
            while line := file.readline(_LONGEST):
                if not line.endswith(b"\n"):
                    if len(line) < _LONGEST:
                        # Another process may still be writing it.
                        return
                    while line and not line.endswith(b"\n"):
                        line = file.readline(_LONGEST)
                    line = b""
                    self.damaged += 1
                self._offset, self._last = file.tell(), line[-_REMEMBERED:]
                row = self._parse(line)
                if row is None:
                    self.damaged += bool(line.strip())
                    continue
                if self._step is not None and row["step"] < self._step:
                    if not skip_falls:
                        raise LinesRepeated
                    self.damaged += 1
                    continue
                self._step = row["step"]
                yield row

    @staticmethod
    def _parse(line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
        is_row = isinstance(row, dict) and type(row.get("step")) is int and abs(row["step"]) < 2**31
        return row if is_row else None


class LinesRepeated(Exception):
    """A file begins anew at an earlier step."""
