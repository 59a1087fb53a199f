"""Servers with vLLM's and SGLang's routes as far as they are used, and the transformers engine behind them.

What :class:`FakeSGLang` answers was read off SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
import socket
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from aiohttp import web

from torchrl_grpo.inference.pieces import Assembler
from torchrl_grpo.inference.protocol import Completion, Probe, Request
from torchrl_grpo.inference.servers.kinds import SGLANG, VLLM, ServerKind
from torchrl_grpo.inference.servers.model_identity import describe
from torchrl_grpo.inference.servers.sglang import loader
from torchrl_grpo.inference.servers.sglang.messages import LOADER
from torchrl_grpo.inference.servers.weight_files import Bucket, read_bucket
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.loading import load_model


class FakeServer:
    """A vLLM server. It runs in a thread of the test's process, on a socket at ``path``.

    Args:
        engine: what generates.
        path: socket.
        key: key that it asks for.
        fault: called with the route of each request, before it is answered; may raise or change the engine.
    """

    kind: ClassVar[ServerKind] = VLLM
    generate_route: ClassVar[str] = "/inference/v1/generate"

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
        # Status and address of a redirect that answers every request.
        self.redirect: tuple[int, str] | None = None
        # Number of processes that the server says its model is divided among.
        self.ranks = 1
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
        app.add_routes(self._routes())
        self._runner = web.AppRunner(app, access_log=None)
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

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._nothing),
            web.post(self.generate_route, self._generate),
            web.post("/abort_requests", self._abort),
            web.post("/collective_rpc", self._call),
            web.post("/update_weight_version", self._update_version),
            web.post("/pause", self._pause),
            web.post("/resume", self._pause),
            web.post("/reset_prefix_cache", self._nothing),
        ]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.redirect is not None:
            return web.Response(status=self.redirect[0], headers={"Location": self.redirect[1]})
        self.requests.append(request.path)
        self.fault(request.path)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        await self._place()
        if sampling.get("logprobs", 0) > 1:
            return self._likeliest(body)
        completion = await self._complete(
            body["token_ids"], sampling, sampling["max_tokens"], sampling["seed"]
        )
        reason = "abort" if completion.finish_reason == "aborted" else completion.finish_reason
        content = [
            {"token_id": token, "logprob": log_prob, "rank": 1}
            for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True)
        ]
        span = {"version": self.version, "start": 0, "end": len(content)}
        choice = {
            "token_ids": completion.token_ids,
            "logprobs": {"content": content},
            "finish_reason": reason,
            "weight_versions": [span],
        }
        usage = {"prompt_tokens": len(body["token_ids"])}
        return web.json_response({"choices": [choice], "usage": usage})

    async def _place(self) -> None:
        while self.hangs or self.paused or len(self._open) >= self.places:
            await asyncio.sleep(0.005)

    async def _complete(
        self, tokens: Sequence[int], sampling: Mapping[str, Any], max_tokens: int, seed: int | None
    ) -> Completion:
        self._count += 1
        done: asyncio.Future[Completion] = self._loop.create_future()
        self._open[self._count] = done
        request = Request(
            self._count,
            tokens,
            max_tokens,
            sampling["temperature"],
            seed,
            sampling.get("ignore_eos", False),
            stop_token_ids=tuple(sampling.get("stop_token_ids", ())),
        )
        self.engine.submit([request])
        if len(self._open) == 1:
            self._stepping = self._loop.create_task(self._step())
        return await done

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
        likeliest = self.engine.next_tokens(Probe([body["token_ids"]], sampling["logprobs"]))
        top = [
            {"token_id": token, "logprob": log_prob, "rank": rank}
            for rank, (token, log_prob) in enumerate(
                zip(likeliest.token_ids[0].tolist(), likeliest.log_probs[0].tolist(), strict=True), 1
            )
        ]
        # The sampled token comes first.
        content = [{"top_logprobs": [top[1], top[0], *top[2:]]}]
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        return web.json_response({"choices": [{"logprobs": {"content": content}}], "usage": usage})

    def _abort_open(self) -> None:
        for key, completion in self.engine.abort_all().items():
            self._open.pop(key).set_result(completion)

    async def _abort(self, request: web.Request) -> web.Response:
        self._abort_open()
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
        arguments = body.get("kwargs", {})
        if self.hangs:
            await asyncio.Event().wait()
        engine = self.engine
        result: Any = None
        if body["method"] == "grpo_describe":
            dtype = str(engine.model.dtype).removeprefix("torch.")
            result = {"dtype": dtype, "head_dtypes": [dtype], "max_model_len": self.max_model_len}
            result |= {"logprobs_mode": "processed_logprobs", "sees_file": Path(arguments["file"]).exists()}
            result |= {"identity": str(id(self)), "ranks": self.ranks, "gpu": ""}
            result["model"] = describe(engine.model.name_or_path, arguments["tensors"])
        elif body["method"] == "grpo_load":
            engine.update(self._assembler.take(read_bucket(Bucket.from_json(arguments["bucket"]))))
        elif body["method"] == "grpo_locate_weights":
            engine.locate_weights(arguments["shapes"])
        elif body["method"] == "grpo_checksums":
            (checksums,) = engine.checksums()
            result = checksums.to_json()
        elif body["method"] == "grpo_start_update":
            self._assembler = Assembler()
        else:
            assert body["method"] in ("grpo_finish_update", "grpo_sign_of_life")
        return web.json_response({"results": [result]})


class _LoadedModel(torch.nn.Module):
    """What the loader of an SGLang server is handed: a model with a method that loads weights."""

    def __init__(self, server: FakeSGLang) -> None:
        super().__init__()
        self.held = server.engine.model
        self._server = server

    def load_weights(self, weights: Any) -> None:
        self._server.engine.update(weights)


class FakeSGLang(FakeServer):
    """An SGLang server; see :class:`FakeServer`."""

    kind = SGLANG
    generate_route = "/generate"

    def __init__(self, *args: Any, **named: Any) -> None:
        self._session_is_open = False
        self._model: _LoadedModel | None = None
        loader._server_args = lambda: SimpleNamespace(
            enable_fp32_lm_head=False,
            context_length=self.max_model_len,
            tp_size=self.ranks,
            pp_size=1,
            model_path=self.engine.model.name_or_path,
            trust_remote_code=False,
        )
        super().__init__(*args, **named)

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._empty),
            web.get("/health_generate", self._health_generate),
            web.post(self.generate_route, self._generate),
            web.post("/abort_request", self._abort),
            web.post("/update_weight_version", self._update_version),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._pause),
            web.post("/flush_cache", self._flush),
            web.post("/begin_weight_update", self._begin),
            web.post("/end_weight_update", self._end),
            web.post("/update_weights_from_tensor", self._from_tensor),
        ]

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _health_generate(self, request: web.Request) -> web.Response:
        # It counts any token of any request, so a full server answers.
        while self.hangs:
            await asyncio.sleep(0.005)
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        await self._place()
        about: dict[str, Any] = {"cached_tokens": 0}
        if "top_logprobs_num" in body:
            likeliest = self.engine.next_tokens(Probe([body["input_ids"]], body["top_logprobs_num"]))
            rows = zip(likeliest.log_probs[0].tolist(), likeliest.token_ids[0].tolist(), strict=True)
            about["output_top_logprobs"] = [[[value, token, None] for value, token in rows]]
            about["finish_reason"] = {"type": "length", "length": 1}
            return web.json_response({"output_ids": [], "meta_info": about})
        completion = await self._complete(
            body["input_ids"], sampling, sampling["max_new_tokens"], sampling.get("sampling_seed")
        )
        about["output_token_logprobs"] = [
            [value, token, None]
            for value, token in zip(completion.log_probs, completion.token_ids, strict=True)
        ]
        span = {"version": self.version, "start": 0, "end": len(completion.token_ids)}
        about |= {"weight_version": self.version, "weight_versions": [span]}
        about["finish_reason"] = {
            "stop": {"type": "stop", "matched": completion.token_ids[-1] if completion.token_ids else None},
            "length": {"type": "length", "length": len(completion.token_ids)},
            "aborted": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        }[completion.finish_reason]
        return web.json_response({"output_ids": completion.token_ids, "meta_info": about})

    async def _abort(self, request: web.Request) -> web.Response:
        assert (await request.json())["abort_all"]
        self._abort_open()
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = request.path == "/pause_generation"
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _flush(self, request: web.Request) -> web.Response:
        if self._open and not self.paused:
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")

    async def _begin(self, request: web.Request) -> web.Response:
        if self._session_is_open:
            return _refused("a weight-update session is already open; call end_weight_update() first")
        self._session_is_open = True
        return web.json_response({"success": True, "message": "Success"})

    async def _end(self, request: web.Request) -> web.Response:
        if not self._session_is_open:
            return _refused("no weight-update session is open; call begin_weight_update() first")
        self._session_is_open = False
        return web.json_response({"success": True, "message": "Success"})

    async def _from_tensor(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self._session_is_open:
            return _refused(
                "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
            )
        assert body["load_format"] == LOADER and body["flush_cache"] is False
        if self._model is None:
            self._model = _LoadedModel(self)
        for carrier in body["serialized_named_tensors"]:
            loader.answer(self._model, _Unpickler(io.BytesIO(base64.b64decode(carrier))).load())
        return web.json_response({"success": True, "message": "Success"})


class _Unpickler(pickle.Unpickler):
    """It takes what SGLang takes, as far as messages need it."""

    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("torch.storage", "_load_from_bytes"): lambda data: torch.load(io.BytesIO(data), weights_only=True),
        ("collections", "OrderedDict"): dict,
    }

    def find_class(self, module: str, name: str) -> Any:
        return self._KNOWN[module, name]


def _refused(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)


def make_engine(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersEngine:
    """The transformers engine on a folder's model, as a run would have it."""
    from torchrl_grpo.config.schema import ModelConfig

    model = load_model(str(folder), ModelConfig(name=str(folder)), torch.device("cpu"), dtype)
    return TransformersEngine(model, [2], 0)
