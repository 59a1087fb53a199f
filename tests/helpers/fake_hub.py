"""A hub on loopback that takes uploads, by the requests that huggingface_hub sends without xet."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

TOKEN = "hf_test"


class FakeHub(ThreadingHTTPServer):
    """Remembers what was uploaded.

    Attributes:
        created: bodies of the requests that make a repository.
        files: path in the repository -> content.
        fails: whether commits are refused.
        refused: name of a repository -> code and error with which requests for its files are refused.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.fails = False
        self.refused: dict[str, tuple[int, str]] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, body: Any, code: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_HEAD(self) -> None:
        name = next((name for name in self.server.refused if f"/{name}/" in self.path), None)
        code, error = (200, "") if name is None else self.server.refused[name]
        self.send_response(code)
        self.send_header("X-Error-Code", error)
        self.end_headers()

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid credentials"}, 401)
        elif self.path == "/api/whoami-v2":
            self.answer({"name": "me", "type": "user"})
        elif "/tree/" in self.path:
            files = self.server.files.items()
            self.answer(
                [{"type": "file", "path": path, "size": len(file), "oid": "0"} for path, file in files]
            )
        else:
            self.answer({"id": "org/name", "sha": "0" * 40, "siblings": []})

    def do_PUT(self) -> None:
        self.server.large[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        content, hub = self.body(), self.server
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(content))
            self.answer({"url": f"{hub.endpoint}/org/name"})
        elif "/preupload/" in self.path:
            mode = {True: "lfs", False: "regular"}
            files = [
                {"path": file["path"], "shouldIgnore": False, "uploadMode": mode[_is_large(file["path"])]}
                for file in json.loads(content)["files"]
            ]
            self.answer({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**entry, "actions": {"upload": {"href": f"{hub.endpoint}/large/{entry['oid']}"}}}
                for entry in json.loads(content)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path and not hub.fails:
            for line in map(json.loads, content.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.large[value["oid"]]
                elif line["key"] == "deletedFile":
                    del hub.files[value["path"]]
            self.answer({"commitUrl": f"{hub.endpoint}/org/name/commit/1", "commitOid": "1" * 40})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        else:
            self.answer({"error": "refused"}, 403)


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


@contextmanager
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a hub, and let the client of this process use it."""
    from huggingface_hub import constants

    hub = FakeHub()
    # It looks for its end as often as this, in seconds.
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
    thread.start()
    for name, value in {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
