"""Shows the report of a run in progress, to this machine alone and at an address that nobody can guess."""

from __future__ import annotations

import hashlib
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from torchrl_grpo.report.page_file import render
from torchrl_grpo.report.reader import RunReader


class ReportServer(ThreadingHTTPServer):
    """Serves the report of a run, which is read anew when its files have changed.

    Args:
        run_dir: folder of the run.
        port: port; 0 takes a free one.

    Raises:
        OSError: the port is in use.
    """

    daemon_threads = True

    def __init__(self, run_dir: Path, port: int) -> None:
        self._run_dir = run_dir
        self._reader = RunReader(run_dir)
        self._lock = threading.Lock()
        self._page, self._page_tag = b"", ""
        self.path = f"/{secrets.token_urlsafe(16)}/"
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """Address of the report."""
        return f"http://127.0.0.1:{self.server_port}{self.path}"

    def tag(self) -> str:
        """Return a text that changes with the files of the run."""
        states = []
        for path in sorted(self._run_dir.glob("*.json*")):
            try:
                about = path.stat()
            except FileNotFoundError:
                # It was a temporary one.
                continue
            states.append((path.name, about.st_size, about.st_mtime_ns))
        return f'"{hashlib.sha256(repr(states).encode()).hexdigest()[:32]}"'

    def page(self) -> tuple[bytes, str]:
        """Return the report and its tag."""
        with self._lock:
            tag = self.tag()
            if tag != self._page_tag:
                self._reader.update()
                self._page = render([self._reader.contents()], watched=True).encode()
                self._page_tag = tag
            return self._page, self._page_tag


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        if self._is_allowed():
            page, tag = self.server.page()
            self._answer(tag, len(page))
            self.wfile.write(page)

    def do_HEAD(self) -> None:
        if self._is_allowed():
            self._answer(self.server.tag(), 0)

    def _is_allowed(self) -> bool:
        # Against DNS rebinding: a page of another site whose name leads to this machine sends that name.
        host = self.headers.get("Host", "").partition(":")[0]
        if host in ("127.0.0.1", "localhost") and secrets.compare_digest(
            self.path.encode(), self.server.path.encode()
        ):
            return True
        self.send_error(404)
        return False

    def _answer(self, tag: str, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: the address is a secret."""
