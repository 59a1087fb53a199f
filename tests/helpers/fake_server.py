"""A server with vLLM's routes as far as they are used, and the transformers engine behind them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from torchrl_grpo.inference.protocol import Completion, Probe, Request
from torchrl_grpo.inference.servers.extension import checksums_to_json
from torchrl_grpo.inference.servers.weight_files import Bucket, read_bucket
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.inference.vllm_in_place import Assembler
from torchrl_grpo.models.loading import load_model


class FakeServer:
    """It runs in a thread of the test's process, on a socket at ``path``.

    Args:
        engine: what generates.
        path: socket.
        key: key that it asks for.
        fault: called with the route of each request, before it is answered; may raise or change the engine.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        path: Path,
        key: str = "secret",
        fault: Callable[[str], None] = lambda route: None,
    ) -> None:
        self.engine, self.path, self.key, self.fault = engine, path, key, fault
        self.version = "default"
        self.requests: list[str] = []
        self.hangs = False
        # Whether no step is made, as while an update is under way.
        self.paused = False
        # Number of responses that run at a time; further ones wait.
        self.places = 10**6
        self.max_model_len = 10_000
        self._open: dict[Hashable, asyncio.Future[Completion]] = {}
        self._count = 0
        self._assembler = Assembler()
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(30)

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def kill(self) -> None:
        """End it at once; whoever waits for an answer loses the connection."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        # Threads start with gradients on.
        torch.set_grad_enabled(False)
        asyncio.set_event_loop(self._loop)
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._nothing),
                web.post("/inference/v1/generate", self._generate),
                web.post("/abort_requests", self._abort),
                web.post("/collective_rpc", self._call),
                web.post("/update_weight_version", self._update_version),
                web.post("/pause", self._pause),
                web.post("/resume", self._pause),
                web.post("/reset_prefix_cache", self._nothing),
            ]
        )
        self._runner = web.AppRunner(app)
        self._loop.run_until_complete(self._runner.setup())
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self.path))
        self._loop.run_until_complete(web.SockSite(self._runner, listening).start())
        self._loop.call_soon(self._up.set)
        self._loop.run_forever()
        # As at the end of a process: nobody listens, and connections break without an answer.
        self._loop.remove_reader(listening)
        listening.close()
        for connection in self._runner.server.connections if self._runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()
        # The transports close in the next round of the loop.
        self._loop.run_until_complete(asyncio.sleep(0.01))

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.requests.append(request.path)
        self.fault(request.path)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        while self.hangs or self.paused or len(self._open) >= self.places:
            await asyncio.sleep(0.005)
        if sampling.get("logprobs", 0) > 1:
            return self._likeliest(body)
        self._count += 1
        key = self._count
        done: asyncio.Future[Completion] = self._loop.create_future()
        self._open[key] = done
        self.engine.submit(
            [
                Request(
                    key,
                    body["token_ids"],
                    sampling["max_tokens"],
                    sampling["temperature"],
                    sampling["seed"],
                    sampling.get("ignore_eos", False),
                )
            ]
        )
        if len(self._open) == 1:
            self._stepping = self._loop.create_task(self._step())
        found = await done
        reason = "abort" if found.finish_reason == "aborted" else found.finish_reason
        content = [
            {"token_id": token, "logprob": log_prob, "rank": 1}
            for token, log_prob in zip(found.token_ids, found.log_probs, strict=True)
        ]
        span = {"version": self.version, "start": 0, "end": len(content)}
        choice = {
            "token_ids": found.token_ids,
            "logprobs": {"content": content},
            "finish_reason": reason,
            "weight_versions": [span],
        }
        return web.json_response({"choices": [choice]})

    async def _step(self) -> None:
        # Requests that are on their way now belong to the same batch.
        await asyncio.sleep(0.005)
        while self._open:
            if self.paused:
                await asyncio.sleep(0.005)
                continue
            for key, completion in self.engine.step():
                self._open.pop(key).set_result(completion)
            await asyncio.sleep(0)

    def _likeliest(self, body: dict[str, Any]) -> web.Response:
        sampling = body["sampling_params"]
        found = self.engine.next_tokens(Probe([body["token_ids"]], sampling["logprobs"]))
        top = [
            {"token_id": token, "logprob": log_prob, "rank": rank}
            for rank, (token, log_prob) in enumerate(
                zip(found.token_ids[0].tolist(), found.log_probs[0].tolist(), strict=True), 1
            )
        ]
        # The sampled token comes first.
        content = [{"top_logprobs": [top[1], top[0], *top[2:]]}]
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        return web.json_response({"choices": [{"logprobs": {"content": content}}], "usage": usage})

    async def _abort(self, request: web.Request) -> web.Response:
        for key, completion in self.engine.abort_all().items():
            self._open.pop(key).set_result(completion)
        return web.json_response({"status": "aborted"})

    async def _update_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = request.path == "/pause"
        return web.json_response({"status": "paused" if self.paused else "resumed"})

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _call(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = body.get("kwargs", {})
        if self.hangs:
            await asyncio.Event().wait()
        engine = self.engine
        result: Any = None
        if body["method"] == "grpo_describe":
            dtype = str(engine.model.dtype).removeprefix("torch.")
            result = {"dtype": dtype, "head_dtypes": [dtype], "max_model_len": self.max_model_len}
            result |= {"logprobs_mode": "processed_logprobs", "sees_file": Path(given["file"]).exists()}
            result |= {"identity": str(id(self)), "ranks": 1}
        elif body["method"] == "grpo_load":
            engine.update(self._assembler.take(read_bucket(Bucket.from_json(given["bucket"]))))
        elif body["method"] == "grpo_locate_weights":
            engine.locate_weights(given["shapes"])
        elif body["method"] == "grpo_checksums":
            (found,) = engine.checksums()
            result = checksums_to_json(found)
        elif body["method"] == "grpo_held":
            result = {"dtype": "float32", "values": {}, "parts": {}}
        elif body["method"] == "grpo_start_update":
            self._assembler = Assembler()
        else:
            assert body["method"] in ("grpo_finish_update", "grpo_sign_of_life")
        return web.json_response({"results": [result]})


def make_engine(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersEngine:
    """The transformers engine on a folder's model, as a run would have it."""
    from torchrl_grpo.config.schema import ModelConfig

    model = load_model(str(folder), ModelConfig(name=str(folder)), torch.device("cpu"), dtype)
    return TransformersEngine(model, [2], 0)
