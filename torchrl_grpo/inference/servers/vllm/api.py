"""The routes of a vLLM server."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from torchrl_grpo.data.pictures import decode, encode
from torchrl_grpo.inference.protocol import Completion, Request
from torchrl_grpo.inference.servers.api import Likeliest, Sampled
from torchrl_grpo.inference.servers.http import Call, ServerConnection
from torchrl_grpo.inference.vllm_arguments import check_prompt_tokens, request_options

_GENERATE, _CALL = "/inference/v1/generate", "/collective_rpc"
# vLLM sends this in place of a log-probability that is not finite.
_NOT_FINITE = -9999.0


class _Entry(msgspec.Struct, gc=False):
    """What vLLM says of a sampled token: an object of it for each, which garbage collection leaves alone."""

    logprob: float
    rank: int | None


class _LogProbs(msgspec.Struct):
    content: list[_Entry]


class _Span(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _LogProbs
    finish_reason: str
    weight_versions: list[_Span] | None


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Response(msgspec.Struct):
    choices: tuple[_Choice]
    usage: _Usage


class VLLMApi:
    """A :class:`~torchrl_grpo.inference.servers.api.ServerApi`."""

    # A call over ``/collective_rpc`` reaches the engine itself.
    sign_of_life = Call(_CALL, {"method": "grpo_sign_of_life"})

    def generate(self, request: Request, end_token_ids: Sequence[int]) -> Call:
        """See :class:`ServerApi`. vLLM takes the end tokens from the model's folder."""
        return replace(_generate(request, request_options(request)), answer=_Response)

    def sampled(self, request: Request, answer: _Response) -> Sampled:
        check_prompt_tokens(request, answer.usage.prompt_tokens)
        (choice,) = answer.choices
        completion = Completion(
            choice.token_ids,
            [_log_prob(entry.logprob, entry.rank) for entry in choice.logprobs.content],
            "aborted" if choice.finish_reason == "abort" else choice.finish_reason,
        )
        return Sampled(completion, {span.version for span in choice.weight_versions or ()})

    def likeliest(self, request: Request, top_k: int) -> Call:
        options = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "detokenize": False}
        # The sampled token comes first and counts, whether or not it is among the likeliest.
        return _generate(request, options | {"logprobs": top_k + 1})

    def read_likeliest(self, answer: Any, top_k: int) -> Likeliest:
        entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        ranked = sorted((entry for entry in entries if entry["rank"]), key=lambda entry: entry["rank"])
        ranked = ranked[:top_k]
        return Likeliest(
            [entry["token_id"] for entry in ranked],
            [_log_prob(entry["logprob"], entry["rank"]) for entry in ranked],
            (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        )

    def abort_all(self, server: ServerConnection) -> None:
        server.post("/abort_requests", {})

    def pause(self, server: ServerConnection) -> None:
        server.post("/pause?mode=keep&clear_cache=true")

    def resume(self, server: ServerConnection) -> None:
        server.post("/resume")

    def name_weights(self, server: ServerConnection, name: str) -> None:
        server.post("/update_weight_version", {"new_version": name})

    def reset_cache(self, server: ServerConnection) -> None:
        if not server.post("/reset_prefix_cache")["success"]:
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def sleep(self, server: ServerConnection) -> None:
        server.post("/sleep?level=2")

    def wake(self, server: ServerConnection) -> None:
        server.post("/wake_up")

    def call(
        self, server: ServerConnection, method: str, arguments: Mapping[str, Any], folder: Path
    ) -> list[Any]:
        answer = server.post(_CALL, {"method": method, "kwargs": dict(arguments)})
        return list((answer or {}).get("results", ()))


def _generate(request: Request, sampling: Mapping[str, Any]) -> Call:
    body = {"token_ids": list(request.written), "sampling_params": sampling}
    if request.pictures is not None and request.pictures.files:
        body["content_parts"] = [{"type": "image_url", "url": _url(data)} for data in request.pictures.files]
    return Call(_GENERATE, body)


# The responses to a prompt have the same pictures.
@lru_cache(maxsize=16)
def _url(data: bytes) -> str:
    """Return a picture as a data URL. vLLM itself would not read all that :func:`decode` does in its way."""
    return "data:image/png;base64," + base64.b64encode(encode(decode(data))).decode()


def _log_prob(value: float, rank: int | None) -> float:
    return math.nan if value == _NOT_FINITE and rank is None else value
