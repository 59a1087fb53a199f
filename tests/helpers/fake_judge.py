"""An OpenAI-compatible endpoint on the loopback, which answers as a test says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class Reply:
    """What the endpoint answers.

    Args:
        text: what the judge writes.
        status: HTTP status.
        headers: further headers.
        body: whole body, in place of a chat completion with ``text``.
        waits_for: event before the answer.
        hangs: whether there is no answer before the endpoint closes.
        hangs_up: whether the connection ends without an answer.
    """

    def __init__(
        self,
        text: str = "",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        waits_for: threading.Event | None = None,
        hangs: bool = False,
        hangs_up: bool = False,
    ) -> None:
        self.status, self.headers = status, dict(headers or {})
        self.waits_for, self.hangs, self.hangs_up = waits_for, hangs, hangs_up
        completion = {"choices": [{"message": {"role": "assistant", "content": text}}]}
        self.body = json.dumps(completion).encode() if body is None else body


class FakeJudge(AbstractContextManager["FakeJudge"]):
    """The endpoint. It runs in threads of the test's process.

    Args:
        answer: function of the request's JSON and its number, from 0, that says what is answered. It is
            called by one thread at a time.

    Attributes:
        requests: JSON of the requests, in the order in which they came.
        authorizations: their header ``Authorization``.
        most_at_once: largest number of requests that were under way at a time.
    """

    def __init__(self, answer: Callable[[dict[str, Any], int], Reply]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.most_at_once = self._at_once = 0
        self.ended = threading.Event()
        lock, judge = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    judge._at_once += 1
                    judge.most_at_once = max(judge.most_at_once, judge._at_once)
                    reply = answer(request, len(judge.requests))
                    judge.requests.append(request)
                    judge.authorizations.append(self.headers.get("Authorization"))
                if reply.waits_for is not None:
                    reply.waits_for.wait()
                if reply.hangs:
                    judge.ended.wait()
                # Before the answer, because its reader may send the next request at once.
                with lock:
                    judge._at_once -= 1
                if reply.hangs or reply.hangs_up:
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        """End it. It may be called twice."""
        if not self.ended.is_set():
            self.ended.set()
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def responses(request: Mapping[str, Any]) -> list[str]:
    """Return the responses in a request, in the order in which they are shown."""
    text = request["messages"][-1]["content"]
    pattern = r"<response-(\w+)(?: number=\d+)?>\n(.*?)\n</response-\1>"
    return [match[2] for match in re.finditer(pattern, text, re.DOTALL)]


def score_length(request: Mapping[str, Any], number: int) -> Reply:
    """Give a response its number of characters, at most 10, as its score."""
    (response,) = responses(request)
    return Reply(
        json.dumps({"reason": f"{len(response)} characters", "score": min(10, max(1, len(response)))})
    )


def rank_length(request: Mapping[str, Any], number: int) -> Reply:
    """Order responses by their number of characters, the longest first; equal lengths share a place."""
    lengths = [len(response) for response in responses(request)]
    tiers = [
        [place for place, length in enumerate(lengths, 1) if length == size]
        for size in sorted(set(lengths), reverse=True)
    ]
    places = [tier[0] if len(tier) == 1 else tier for tier in tiers]
    return Reply(json.dumps({"reason": "by length", "ranking": places}))
