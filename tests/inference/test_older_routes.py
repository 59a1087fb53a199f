"""The routes that servers of older vLLM get: what they answer, and when they stop to generate."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_vlm import picture

from torchrl_grpo.data.pictures import encode
from torchrl_grpo.inference import vllm_compat
from torchrl_grpo.inference.protocol import PromptPictures, Request
from torchrl_grpo.inference.servers.vllm.api import VLLMApi
from torchrl_grpo.inference.servers.vllm.older_routes import OlderRoutes

GENERATE = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "logprobs": 1}}


def entry(logprob: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank)


class Engine:
    """Stands for vLLM's engine: it answers as soon as ``may_end`` is set."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.began = asyncio.Event()
        self.was_cancelled = False
        self.aborted = False
        self.can_reset = True

    async def stream(self, name: str, prompt: Any, params: Any) -> AsyncIterator[Any]:
        self.began.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        assert prompt["prompt_token_ids"] == [1, 2] and params["max_tokens"] == 2
        self.pictures = prompt["multi_modal_data"]["image"]
        self.params = params
        tables = [{7: entry(-0.5, 2), 9: entry(-0.1, 1)}, {8: entry(math.nan, 0)}]
        choice = SimpleNamespace(token_ids=[7, 8], logprobs=tables, finish_reason="length")
        yield SimpleNamespace(outputs=[choice], prompt_token_ids=[1, 2, 2], num_cached_tokens=None)


class Client:
    """Sends requests to the middleware, as a server of HTTP does."""

    def __init__(self, engine: Engine) -> None:
        self._state = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        self.routes = OlderRoutes(self._others)
        self.leaves = asyncio.Event()

    async def _others(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def post(self, path: str, body: Any, method: str = "POST") -> tuple[int, Any] | None:
        """Return status and answer; None if there is none."""
        text = json.dumps(body).encode()
        parts = [(text[:3], True), (text[3:], False)]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if parts:
                part, more = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": more}
            await self.leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": path, "method": method, "app": self._state}
        await self.routes(scope, receive, send)
        return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else None


@pytest.fixture(autouse=True)
def engines_are_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def abort(client: Engine) -> None:
        client.aborted = True

    async def reset(client: Engine) -> bool:
        return client.can_reset

    def params(**options: Any) -> dict[str, Any]:
        if "unknown" in options:
            raise TypeError("unexpected keyword argument 'unknown'")
        return options

    def prompt_of(tokens: Sequence[int], pictures: Sequence[Any]) -> dict[str, Any]:
        return {"prompt_token_ids": list(tokens), "multi_modal_data": {"image": list(pictures)}}

    monkeypatch.setattr(vllm_compat, "prompt_of", prompt_of)
    monkeypatch.setattr(vllm_compat, "sampling_params", params)
    monkeypatch.setattr(vllm_compat, "stream", Engine.stream)
    monkeypatch.setattr(vllm_compat, "abort_everything", abort)
    monkeypatch.setattr(vllm_compat, "reset_cache", reset)


def test_tokens_come_with_log_probabilities_ranks_and_the_name_of_the_weights() -> None:
    async def ask() -> Any:
        engine = Engine()
        client = Client(engine)
        assert await client.post("/update_weight_version", {"new_version": "a"}) == (200, {})
        engine.may_end.set()
        return await client.post("/inference/v1/generate", GENERATE)

    status, answer = asyncio.run(ask())
    (choice,) = answer["choices"]
    assert status == 200 and choice["token_ids"] == [7, 8] and choice["finish_reason"] == "length"
    first, second = choice["logprobs"]["content"]
    assert (first["token_id"], first["logprob"], first["rank"]) == (7, -0.5, 2)
    assert [(entry["token_id"], entry["rank"]) for entry in first["top_logprobs"]] == [(7, 2), (9, 1)]
    # vLLM's way to say that it is not a number, which JSON has no word for.
    assert (second["logprob"], second["rank"]) == (-9999.0, None)
    assert choice["weight_versions"] == [{"version": "a"}]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] is None


def test_pictures_reach_the_engine_decoded_and_broken_ones_are_refused() -> None:
    shown = picture(20, 30)
    request = Request("a", [1, 9, 9, 2], 2, 1.0, pictures=PromptPictures((encode(shown),), (1, 2), 4, (9,)))
    call = VLLMApi().generate(request, ())

    async def ask() -> Any:
        engine = Engine()
        engine.may_end.set()
        client = Client(engine)
        broken = {**call.body, "content_parts": [{"type": "image_url", "url": "data:image/png;base64,eHl6"}]}
        return engine, [await client.post(call.path, body) for body in (call.body, broken)]

    engine, [(status, _), refused] = asyncio.run(ask())
    assert status == 200
    (received,) = engine.pictures
    assert received.tobytes() == shown.tobytes() and received.size == shown.size
    assert engine.params["logit_bias"] == {9: -100.0}
    assert refused[0] == 400 and "it cannot be decoded" in refused[1]["error"]


def test_an_answer_over_which_the_weights_changed_names_both() -> None:
    async def ask() -> Any:
        engine = Engine()
        client = Client(engine)
        asking = asyncio.ensure_future(client.post("/inference/v1/generate", GENERATE))
        await engine.began.wait()
        await client.post("/update_weight_version", {"new_version": "b"})
        engine.may_end.set()
        return await asking

    _, answer = asyncio.run(ask())
    assert answer["choices"][0]["weight_versions"] == [{"version": "default"}, {"version": "b"}]


def test_a_request_of_a_client_that_leaves_is_not_generated_to_its_end() -> None:
    async def ask() -> Engine:
        engine = Engine()
        client = Client(engine)
        asking = asyncio.ensure_future(client.post("/inference/v1/generate", GENERATE))
        await engine.began.wait()
        client.leaves.set()
        assert await asking is None
        # A canceled task ends when the loop runs it.
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 20)
        return engine

    assert asyncio.run(ask()).was_cancelled


def test_caches_are_reset_and_requests_aborted() -> None:
    async def ask() -> list[Any]:
        engine = Engine()
        client = Client(engine)
        answers = [await client.post("/reset_prefix_cache", None)]
        engine.can_reset = False
        answers += [await client.post("/reset_prefix_cache", None), await client.post("/abort_requests", {})]
        assert engine.aborted
        return answers

    assert asyncio.run(ask()) == [(200, {"success": True}), (200, {"success": False}), (200, {})]


def test_an_option_that_vllm_does_not_know_is_refused_and_other_routes_are_passed_on() -> None:
    async def ask() -> list[Any]:
        client = Client(Engine())
        bad = {"token_ids": [1], "sampling_params": {"unknown": 1}}
        return [
            await client.post("/inference/v1/generate", bad),
            await client.post("/pause", {}),
            await client.post("/inference/v1/generate", {}, method="GET"),
        ]

    refused, *passed = asyncio.run(ask())
    assert refused[0] == 400 and "'unknown'" in refused[1]["error"]
    assert [status for status, _ in passed] == [299, 299]
