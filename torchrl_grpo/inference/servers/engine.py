"""An engine in a vLLM server, which takes and gives token ids over HTTP.

The server needs what :mod:`~torchrl_grpo.inference.servers.command` starts it with: the methods of
:class:`~torchrl_grpo.inference.servers.extension.WeightExtension`, and log-probabilities of the sampled
distribution.
"""

from __future__ import annotations

import itertools
import math
import queue
import tempfile
import time
import uuid
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.errors import ConfigError, ModelError
from torchrl_grpo.inference.checksums import Checksums, merge_ranks
from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Request, SteppingEngine
from torchrl_grpo.inference.servers.carriers import BucketSource
from torchrl_grpo.inference.servers.extension import read_checksums
from torchrl_grpo.inference.servers.http import ServerConnection, ServerLost
from torchrl_grpo.inference.servers.weight_files import WeightFiles
from torchrl_grpo.inference.vllm_arguments import name_of

# Longest duration of a step in which no response ends, in seconds.
_STEP_S = 0.2
# Seconds without an answer after which the server's engine is asked for a sign of life.
_QUIET_S = 30.0
# A request that reaches the server after it was told to abort all is aborted this much later, in seconds.
_ABORT_AGAIN_S = 0.2
_GENERATE, _CALL = "/inference/v1/generate", "/collective_rpc"
# vLLM sends this in place of a log-probability that is not finite.
_NOT_FINITE = -9999.0


@dataclass(frozen=True)
class Wanted:
    """What a server must compute with, so that its numbers are those of an engine in this process.

    Attributes:
        dtype: dtype in which weights are published.
        head_dtype: dtype of the output head's products; None for ``dtype``.
        max_model_len: longest prompt and response together.
    """

    dtype: torch.dtype
    head_dtype: torch.dtype | None
    max_model_len: int


class ServerEngine(SteppingEngine):
    """The engine of one server.

    Args:
        connection: connection to the server; closed with the engine.
        wanted: what the server must compute with.
        folder: folder for weights on their way, which the server must see.
        timeout_s: seconds within which the server's engine must answer.

    Raises:
        ConfigError: the server refuses the key, computes otherwise than wanted, or does not see the folder.
        ServerLost: the server does not answer.

    Attributes:
        identity: text that differs between servers.
    """

    def __init__(
        self, connection: ServerConnection, *, wanted: Wanted, folder: Path, timeout_s: float
    ) -> None:
        self._connection = connection
        self._folder = folder
        self._timeout_s = timeout_s
        self._names = itertools.count()
        self._running: dict[str, Request] = {}
        self._answers: queue.SimpleQueue[tuple[str | None, Any]] = queue.SimpleQueue()
        # What the server calls the weights that it was given last. Every answer names the weights of its
        # tokens, so a server that was restarted cannot pass for this one.
        self._weights_name: str | None = None
        # By the monotonic clock: when the server is asked for a sign of life if it has not answered before,
        # and when it must have given it; infinite while it is not asked.
        self._next_check = time.monotonic() + _QUIET_S
        self._lost_at = math.inf
        self._shapes: dict[str, tuple[int, ...]] = {}
        # Whether vLLM's own loader must load weights, because it changes some of them.
        self._by_loader = False
        # An earlier run may have ended in the middle of an update, and left requests behind.
        connection.post("/abort_requests", {})
        with tempfile.NamedTemporaryFile(prefix="torchrl-grpo-", dir=folder) as seen:
            described, *_ = self._call("grpo_describe", file=seen.name)
        connection.post("/resume")
        self.identity: str = described["identity"]
        _check_described(connection.address, described, wanted, folder)

    def submit(self, requests: Sequence[Request]) -> None:
        """See :meth:`SteppingEngine.submit`."""
        for request in requests:
            name = str(next(self._names))
            self._running[name] = request
            body = _body(
                request.tokens,
                max_tokens=request.max_new_tokens,
                temperature=request.temperature,
                seed=request.seed,
                ignore_eos=request.ignore_eos,
                logprobs=0,
            )
            self._connection.post_later(_GENERATE, body, partial(self._on_answer, name))

    def _on_answer(self, name: str | None, answer: Any) -> None:
        # This runs in the thread of the connection.
        self._answers.put((name, answer))

    def step(self) -> list[tuple[Hashable, Completion]]:
        """Wait a moment for responses that end, and return them.

        Raises:
            ServerLost: the server does not answer, has aborted a request that nobody here wanted aborted, or
                does not hold the weights that it was given.
        """
        ended = self._received(_STEP_S) if self._running else []
        for _, completion in ended:
            if completion.finish_reason == "aborted":
                raise ServerLost(
                    f"{self._connection.address} has aborted a request: it is ending, or another run uses it"
                )
        return ended

    def _received(self, wait_s: float) -> list[tuple[Hashable, Completion]]:
        """Return the completions that have arrived; wait for the first one."""
        try:
            arrived = [self._answers.get(timeout=wait_s)]
        except queue.Empty:
            self._watch()
            return []
        while not self._answers.empty():
            arrived.append(self._answers.get())
        self._next_check, self._lost_at = time.monotonic() + _QUIET_S, math.inf
        ended = []
        for name, answer in arrived:
            if isinstance(answer, BaseException):
                raise answer
            if name is not None:
                ended.append((self._running.pop(name).key, self._completion(answer)))
        return ended

    def _watch(self) -> None:
        """Ask a server that has been quiet for a sign of life, without waiting for it.

        The engine gives it between two of its steps. It needs no place among the running responses, so a
        server that is full is not taken for a dead one.

        Raises:
            ServerLost: the sign did not come in time.
        """
        now = time.monotonic()
        if now > self._lost_at:
            raise ServerLost(
                f"{self._connection.address}: its engine gave no sign of life within {self._timeout_s:g} s"
            )
        if now > self._next_check and math.isinf(self._lost_at):
            self._lost_at = now + self._timeout_s
            body = {"method": "grpo_sign_of_life"}
            self._connection.post_later(_CALL, body, partial(self._on_answer, None))

    def _completion(self, answer: dict[str, Any]) -> Completion:
        (choice,) = answer["choices"]
        if self._weights_name is not None and choice["token_ids"]:
            names = {span["version"] for span in choice["weight_versions"] or ()}
            if names != {self._weights_name}:
                raise ServerLost(
                    f"{self._connection.address} generated with weights {sorted(names)} and was given "
                    f"{self._weights_name}: it was restarted, or another run uses it"
                )
        entries = choice["logprobs"]["content"]
        reason = choice["finish_reason"]
        return Completion(
            choice["token_ids"],
            [_log_prob(entry) for entry in entries],
            "aborted" if reason == "abort" else reason,
        )

    def abort_all(self) -> dict[Hashable, Completion]:
        """See :meth:`SteppingEngine.abort_all`."""
        found: dict[Hashable, Completion] = {}
        while self._running:
            self._connection.post("/abort_requests", {})
            found.update(self._received(_ABORT_AGAIN_S))
        return found

    def next_tokens(self, probe: Probe) -> ProbeResult:
        """See :meth:`Engine.next_tokens`."""
        likeliest, cached = [], []
        for prompt in probe.prompts:
            # The sampled token comes first and counts, whether or not it is among the likeliest.
            body = _body(prompt, max_tokens=1, temperature=1.0, seed=0, logprobs=probe.top_k + 1)
            answer = self._connection.post(_GENERATE, body, timeout_s=self._timeout_s)
            entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            by_rank = sorted((entry for entry in entries if entry["rank"]), key=lambda entry: entry["rank"])
            likeliest.append(by_rank[: probe.top_k])
            cached.append((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
        return ProbeResult(
            torch.tensor([[entry["token_id"] for entry in row] for row in likeliest]),
            torch.tensor([[_log_prob(entry) for entry in row] for row in likeliest]),
            cached_tokens=cached[0],
        )

    def start_update(self) -> None:
        """See :meth:`Engine.start_update`."""
        # Requests of others are frozen, and go on with the new weights.
        self._connection.post("/pause?mode=keep&clear_cache=true")
        self._call("grpo_start_update", by_loader=self._by_loader)

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See :meth:`Engine.update`. Weights that lie in files are not copied."""
        files = weights if isinstance(weights, BucketSource) else WeightFiles(self._folder).write(weights)
        buckets = files.buckets()
        try:
            for bucket in buckets:
                self._call("grpo_load", bucket=bucket.to_json())
        finally:
            if isinstance(buckets, Generator):
                # Whoever fills the buckets waits for this reader.
                buckets.close()

    def finish_update(self) -> None:
        """See :meth:`Engine.finish_update`."""
        self._call("grpo_finish_update")
        self._weights_name = uuid.uuid4().hex
        self._connection.post("/update_weight_version", {"new_version": self._weights_name})
        self._connection.post("/resume")

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See :meth:`Engine.locate_weights`."""
        self._shapes = dict(shapes)
        self._call("grpo_locate_weights", shapes={name: list(shape) for name, shape in shapes.items()})
        found = [read_checksums(one) for one in self._call("grpo_held")]
        if len(found) == 1:
            return
        whole = merge_ranks(found, self._shapes)
        missing = [name for name in shapes if name not in whole.values]
        for name in missing:
            if any(rank.values.get(name) or rank.parts.get(name) for rank in found):
                raise _loading_error(self._connection.address, f"only a part of {name}")
        self._by_loader = bool(missing)
        if missing:
            ignored = [set(names) for names in self._call("grpo_ignored", names=missing)]
            for name in missing:
                if all(name in names for names in ignored):
                    raise _loading_error(self._connection.address, f"nothing of {name}")

    def checksums(self) -> tuple[Checksums, ...]:
        """See :meth:`Engine.checksums`."""
        ranks = [read_checksums(found) for found in self._call("grpo_checksums")]
        return (merge_ranks(ranks, self._shapes),)

    def reset_cache(self) -> None:
        """See :meth:`Engine.reset_cache`."""
        if not self._connection.post("/reset_prefix_cache")["success"]:
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def sleep(self) -> None:
        """See :meth:`Engine.sleep`."""
        self._connection.post("/sleep?level=2")

    def wake(self) -> None:
        """See :meth:`Engine.wake`."""
        self._connection.post("/wake_up")

    def close(self) -> None:
        """Close the connection. Whoever has started the server ends it."""
        self._connection.close()

    def _call(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker of the server, and return the results."""
        answer = self._connection.post(_CALL, {"method": method, "kwargs": arguments})
        return list((answer or {}).get("results", ()))


def _check_described(address: str, found: Mapping[str, Any], wanted: Wanted, folder: Path) -> None:
    """Compare what a server says of itself with what it must be."""
    dtype = name_of(wanted.dtype)
    start = f"inference_model.servers: the server at {address}"
    again = "start it with grpo-serve and the words of this run"
    if found["dtype"] != dtype:
        raise ConfigError(
            f"{start} computes in {found['dtype']}, and the run publishes weights in {dtype}; write "
            f"inference_model.dtype={found['dtype']}, or {again}"
        )
    head = dtype if wanted.head_dtype is None else name_of(wanted.head_dtype)
    if found["head_dtypes"] != [head]:
        raise ConfigError(
            f"{start} computes logits in {', '.join(found['head_dtypes'])}, and the run needs {head} "
            f"(inference_model.head_dtype); {again}"
        )
    if found["max_model_len"] < wanted.max_model_len:
        raise ConfigError(
            f"{start} takes {found['max_model_len']} tokens, and the run needs "
            f"inference_model.max_model_len={wanted.max_model_len}; write inference_model.max_model_len="
            f"{found['max_model_len']}, or {again}"
        )
    if found["logprobs_mode"] != "processed_logprobs":
        raise ConfigError(f"{start} returns {found['logprobs_mode']}, not those of what it samples; {again}")
    if not found["sees_file"]:
        raise ConfigError(
            f"{start} does not see files in {folder}, through which weights travel; start it on this "
            "machine, and in the same container, or write inference_model.weight_transfer=folder and "
            "inference_model.weight_folder=FOLDER, which both see"
        )


def _loading_error(address: str, what: str) -> ModelError:
    return ModelError(
        f"inference_model.backend=vllm_server: of the published weights, the ranks of {address} load {what}; "
        "write inference_model.tensor_parallel_size=1 and inference_model.pipeline_parallel_size=1"
    )


def _body(tokens: Sequence[int], **sampling: Any) -> dict[str, Any]:
    return {"token_ids": list(tokens), "sampling_params": {"detokenize": False, **sampling}}


def _log_prob(entry: dict[str, Any]) -> float:
    value: float = entry["logprob"]
    return math.nan if value == _NOT_FINITE and entry["rank"] is None else value
