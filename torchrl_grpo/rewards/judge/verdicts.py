"""The answers of a judge on disk: nothing is asked for twice, and a resumed run gets the same answers.

A folder has files of JSON lines, ``{"key": ..., "answer": ...}``. Each process appends to a file of its own,
a line in one write, so a process that is killed leaves all its lines, and perhaps a piece of one, which is
not read. Only answers that were verdicts are kept, and never failures. Links are not followed. Whoever reads
an answer checks it like one of the endpoint.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torchrl_grpo.rewards.judge.endpoint import MOST_CHARACTERS
from torchrl_grpo.runtime.files.shared_files import open_regular

_log = logging.getLogger(__name__)
# Characters of the longest line: JSON may need six for one.
_LONGEST_LINE = 6 * MOST_CHARACTERS + 1_000


class Verdicts:
    """Answers by key.

    Args:
        folder: folder of the files, which is created with the first answer; None to keep answers in memory
            only.
        own: whether only files of this user are read. Machines may number users in different ways, and who
            can write to the folder of a run can change the run anyway.
    """

    def __init__(self, folder: Path | None, own: bool) -> None:
        self._folder = folder
        self._file: int | None = None
        self._lock = threading.Lock()
        self._answers: dict[str, str] = {}
        if folder is not None and folder.is_dir():
            for path in sorted(folder.glob("*.jsonl")):
                self._answers.update(_lines(path, own))

    def get(self, key: str) -> str | None:
        """Return the answer to a question; None if there is none."""
        return self._answers.get(key)

    def add(self, key: str, answer: str) -> None:
        """Keep an answer. If it cannot be written, it is kept in memory, and the log says why."""
        with self._lock:
            self._answers[key] = answer
            if self._folder is None:
                return
            line = json.dumps({"key": key, "answer": answer}) + "\n"
            try:
                if self._file is None:
                    self._file = self._create(self._folder)
                os.write(self._file, line.encode())
            except OSError as error:
                _log.warning(
                    "a verdict cannot be kept in %s, so it is asked for again if the run is resumed: %s",
                    self._folder, error, extra={"fold": "verdicts"},
                )  # fmt: skip

    @staticmethod
    def _create(folder: Path) -> int:
        folder.mkdir(parents=True, exist_ok=True)
        # An existing name, a link too, would be an error.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        # By time, so that what is in several files is read from the newest.
        name = f"{time.time_ns():020}-{secrets.token_hex(4)}.jsonl"
        return open_regular(folder / name, flags)

    def close(self) -> None:
        """Close the file. It may be called twice."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file, self._folder = None, None


def _lines(path: Path, own: bool) -> Iterator[tuple[str, str]]:
    try:
        descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW, own=own)
        file = os.fdopen(descriptor, encoding="utf-8", errors="replace")
    except OSError as error:
        _log.warning("verdicts of %s are not used: %s", path, error)
        return
    with file:
        while line := file.readline(_LONGEST_LINE):
            try:
                entry = json.loads(line)
                key, answer = entry["key"], entry["answer"]
            except (ValueError, RecursionError, LookupError, TypeError):
                # A piece of a line, or something else's file.
                continue
            if isinstance(key, str) and isinstance(answer, str):
                yield key, answer
