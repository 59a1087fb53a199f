"""``python -m benchmarks.scale.server SOCKET TOKENS``: a vLLM server that has one prepared answer.

It is a judge too, which takes a second for each verdict.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from aiohttp import web

PROMPT_TOKENS = 500
_VERDICT = json.dumps({"reason": "", "score": 5})


def answer_of(tokens: int) -> dict[str, Any]:
    """Return what vLLM answers for a response of so many tokens."""
    draw = random.Random(0)
    content = []
    for _ in range(tokens):
        entry = {"token_id": draw.randrange(150_000), "logprob": -3 * draw.random(), "rank": 1}
        content.append({**entry, "top_logprobs": [entry]})
    choice = {
        "index": 0,
        "token_ids": [entry["token_id"] for entry in content],
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
    }
    return {"request_id": "0", "choices": [choice], "usage": {"prompt_tokens": PROMPT_TOKENS}}


_DESCRIBED = {
    "identity": "", "gpu": "", "ranks": 1, "dtype": "bfloat16", "head_dtypes": ["bfloat16"],
    "max_model_len": 100_000, "logprobs_mode": "processed_logprobs", "sees_file": True,
}  # fmt: skip


class _Judge:
    """Counts the requests that are under way."""

    def __init__(self) -> None:
        self._now = self._most = 0

    async def judge(self, request: web.Request) -> web.Response:
        await request.read()
        self._now += 1
        self._most = max(self._most, self._now)
        await asyncio.sleep(1.0)
        self._now -= 1
        return web.json_response({"choices": [{"message": {"content": _VERDICT}}]})

    async def most(self, request: web.Request) -> web.Response:
        return web.json_response(self._most)


def main() -> None:
    """Serve until killed."""
    answer, judge = json.dumps(answer_of(int(sys.argv[2]))).encode(), _Judge()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def call(request: web.Request) -> web.Response:
        method = (await request.json())["method"]
        return web.json_response({"results": [_DESCRIBED if method == "grpo_describe" else None]})

    async def nothing(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"success": True})

    app = web.Application(client_max_size=2**30)
    app.add_routes(
        [
            web.post("/inference/v1/generate", generate),
            web.post("/collective_rpc", call),
            web.post("/v1/chat/completions", judge.judge),
            web.get("/most", judge.most),
            web.route("*", "/{other:.*}", nothing),
        ]
    )
    web.run_app(app, path=sys.argv[1], access_log=None, print=None)


if __name__ == "__main__":
    main()
