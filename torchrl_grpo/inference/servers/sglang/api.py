"""The routes of an SGLang server.

SGLang has no route that calls a method of the process with the weights. It has one that hands tensors to a
function named at the start (``--custom-weight-loader``). A call travels as the name of an empty tensor, and
:mod:`~torchrl_grpo.inference.servers.sglang.loader` writes the result into a file that this module has made.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.protocol import Completion, Request
from torchrl_grpo.inference.servers.api import Likeliest, Sampled
from torchrl_grpo.inference.servers.http import Call, ServerConnection, ServerLost
from torchrl_grpo.inference.servers.sglang.messages import ANSWER_PREFIX, LOADER
from torchrl_grpo.runtime.files.shared_files import read_regular

# Methods during an update. SGLang accepts tensors only between the first and the last of them.
_START, _LOAD, _FINISH = "grpo_start_update", "grpo_load", "grpo_finish_update"
_DESCRIBE = "grpo_describe"
# Seconds for which SGLang waits for the last step of aborted requests before it drops its cache.
_IDLE_S = 30


class _Reason(msgspec.Struct):
    type: str


class _Span(msgspec.Struct):
    version: str


class _About(msgspec.Struct):
    """What SGLang says of a response; of each token its log-probability, its id and nothing."""

    finish_reason: _Reason
    # A request that is aborted before its first token has no list of log-probabilities.
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    weight_versions: list[_Span] = []


class _Response(msgspec.Struct):
    meta_info: _About


class SGLangApi:
    """A :class:`~torchrl_grpo.inference.servers.api.ServerApi`.

    The sign of life is SGLang's own: a token that it generates if it does nothing else.
    """

    sign_of_life = Call("/health_generate", verb="GET")

    def generate(self, request: Request, end_token_ids: Sequence[int]) -> Call:
        sampling = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "ignore_eos": request.ignore_eos,
            "stop_token_ids": [*end_token_ids, *request.stop_token_ids],
        }
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        return replace(_generate(request.tokens, sampling), answer=_Response)

    def sampled(self, request: Request, answer: _Response) -> Sampled:
        about = answer.meta_info
        reason = about.finish_reason.type
        entries = about.output_token_logprobs
        completion = Completion(
            [token for _, token, _ in entries],
            [_number(value) for value, _, _ in entries],
            "aborted" if reason == "abort" else reason,
        )
        return Sampled(completion, {span.version for span in about.weight_versions})

    def likeliest(self, request: Request, top_k: int) -> Call:
        return _generate(request.tokens, {"max_new_tokens": 1, "temperature": 1.0}, top_logprobs_num=top_k)

    def read_likeliest(self, answer: Any, top_k: int) -> Likeliest:
        about = answer["meta_info"]
        (entries,) = about["output_top_logprobs"]
        return Likeliest(
            [token for _, token, _ in entries],
            [_number(value) for value, _, _ in entries],
            about["cached_tokens"],
        )

    def abort_all(self, server: ServerConnection) -> None:
        server.post("/abort_request", {"abort_all": True})

    def pause(self, server: ServerConnection) -> None:
        """See :class:`ServerApi`. Requests of others lose their keys and values, and compute them again."""
        server.post("/pause_generation", {"mode": "retract"})

    def resume(self, server: ServerConnection) -> None:
        server.post("/continue_generation", {})

    def name_weights(self, server: ServerConnection, name: str) -> None:
        server.post("/update_weight_version", {"new_version": name, "abort_all_requests": False})

    def reset_cache(self, server: ServerConnection) -> None:
        server.post(f"/flush_cache?timeout={_IDLE_S}", {})

    def sleep(self, server: ServerConnection) -> None:
        server.post("/release_memory_occupation", {})

    def wake(self, server: ServerConnection) -> None:
        server.post("/resume_memory_occupation", {})

    def call(
        self, server: ServerConnection, method: str, arguments: Mapping[str, Any], folder: Path
    ) -> list[Any]:
        alone = method not in (_START, _LOAD, _FINISH)
        if method == _DESCRIBE:
            # An earlier run may have ended in the middle of an update.
            server.send(Call("/end_weight_update", {}, may_be_refused=True))
        if alone or method == _START:
            server.post("/begin_weight_update", {"selector": "target"})
        try:
            return [self._ask(server, method, arguments, folder)]
        finally:
            if alone or method == _FINISH:
                server.post("/end_weight_update", {})

    def _ask(self, server: ServerConnection, method: str, arguments: Mapping[str, Any], folder: Path) -> Any:
        with tempfile.NamedTemporaryFile(prefix=ANSWER_PREFIX, dir=folder) as file:
            message = json.dumps({"method": method, "arguments": arguments, "answer": file.name})
            carrier = base64.b64encode(pickle.dumps([(message, torch.empty(0))])).decode()
            body = {"serialized_named_tensors": [carrier], "load_format": LOADER, "flush_cache": False}
            server.post("/update_weights_from_tensor", body)
            written = read_regular(file.name)
        if not written:
            raise ConfigError(
                f"inference_model.servers: the server at {server.address} does not see files in {folder}, "
                "through which weights travel; start it on this machine, and in the same container, or "
                "write inference_model.weight_transfer=folder and inference_model.weight_folder=FOLDER, "
                "which both see"
            )
        answer = json.loads(written)
        if "error" in answer:
            raise ServerLost(f"{server.address}: {method} failed: {answer['error']}")
        return answer["result"]


def _generate(tokens: Sequence[int], sampling: Mapping[str, Any], **more: Any) -> Call:
    body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True, **more}
    return Call("/generate", body)


def _number(value: float | None) -> float:
    # JSON has no number that is not finite, and SGLang sends null for one.
    return math.nan if value is None else value
