"""``python -m benchmarks.scale.server SOCKET TOKENS``: a vLLM server that has one prepared answer."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from aiohttp import web


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
    return {"request_id": "0", "choices": [choice]}


_DESCRIBED = {
    "identity": "", "gpu": "", "ranks": 1, "dtype": "bfloat16", "head_dtypes": ["bfloat16"],
    "max_model_len": 100_000, "logprobs_mode": "processed_logprobs", "sees_file": True,
}  # fmt: skip


def main() -> None:
    """Serve until killed."""
    answer = json.dumps(answer_of(int(sys.argv[2]))).encode()

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
            web.route("*", "/{other:.*}", nothing),
        ]
    )
    web.run_app(app, path=sys.argv[1], access_log=None, print=None)


if __name__ == "__main__":
    main()
