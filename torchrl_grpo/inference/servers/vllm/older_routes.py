"""ASGI middleware with the routes that the servers of older vLLM lack.

It answers as vLLM 0.32 does, as far as :mod:`~torchrl_grpo.inference.servers.engine` reads the answers: token
ids with log-probabilities and ranks, the number of tokens of the prompt and of those that came out of a
cache, and the weights' name.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from torchrl_grpo.data.pictures import decode
from torchrl_grpo.inference import vllm_compat
from torchrl_grpo.inference.servers.asgi import (
    App,
    Receive,
    Scope,
    Send,
    body_of,
    send_json,
    until_disconnected,
)

# vLLM sends this in place of a log-probability that JSON cannot carry.
_LOWEST = -9999.0


class OlderRoutes:
    """Middleware for vLLM's ``--middleware``, in front of its application.

    Args:
        app: application behind it.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._names = itertools.count()
        # What a server calls the weights that it has read from disk.
        self._version = "default"
        self._routes = {
            "/inference/v1/generate": self._generate,
            "/abort_requests": self._abort,
            "/update_weight_version": self._rename,
            "/reset_prefix_cache": self._reset,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to one of the routes, and pass on all others."""
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = json.loads(await body_of(receive) or b"null")
        answering = asyncio.ensure_future(route(scope["app"].state.engine_client, body))
        # A client that goes away wants no answer: vLLM then stops to generate it.
        leaving = asyncio.ensure_future(until_disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_answered = answering.done()
            leaving.cancel()
            answering.cancel()
        if not is_answered:
            return
        try:
            status, answer = 200, answering.result()
        except (TypeError, ValueError) as error:
            status, answer = 400, {"error": str(error)}
        await send_json(send, status, answer)

    async def _generate(self, client: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        began_with = self._version
        options = dict(body["sampling_params"])
        if options.get("logit_bias"):
            # JSON has no keys but texts.
            options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
        params = vllm_compat.sampling_params(**options)
        # The content of data URLs.
        files = [base64.b64decode(part["url"].partition(",")[2]) for part in body.get("content_parts", ())]
        prompt = vllm_compat.prompt_of(body["token_ids"], [decode(data) for data in files])
        name = f"older-routes-{next(self._names)}"
        done: Any = None
        async for output in vllm_compat.stream(client, name, prompt, params):
            done = output
        (choice,) = done.outputs
        # Which token was the first of the newer weights is not known, so the spans have no ends.
        versions = [{"version": version} for version in dict.fromkeys([began_with, self._version])]
        tokens = list(choice.token_ids)
        entries = [
            _entry(token, table[token]) | {"top_logprobs": [_entry(*item) for item in table.items()]}
            for token, table in zip(tokens, choice.logprobs or (), strict=True)
        ]
        return {
            "choices": [
                {
                    "token_ids": tokens,
                    "finish_reason": choice.finish_reason,
                    "logprobs": {"content": entries},
                    "weight_versions": versions,
                }
            ],
            "usage": {
                "prompt_tokens": len(done.prompt_token_ids),
                "prompt_tokens_details": {"cached_tokens": done.num_cached_tokens},
            },
        }

    async def _abort(self, client: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        await vllm_compat.abort_everything(client)
        return {}

    async def _rename(self, client: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        self._version = body["new_version"]
        return {}

    async def _reset(self, client: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"success": await vllm_compat.reset_cache(client)}


def _entry(token: int, record: Any) -> dict[str, Any]:
    """Return vLLM's record of a token as JSON; a NaN has no rank."""
    logprob = record.logprob
    finite = logprob if math.isfinite(logprob) else _LOWEST
    return {"token_id": token, "logprob": finite, "rank": record.rank or None}
