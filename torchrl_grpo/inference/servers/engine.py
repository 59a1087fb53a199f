"""An engine in a vLLM server, which takes and gives token ids over HTTP.

The server needs what :mod:`~torchrl_grpo.inference.servers.command` starts it with: the methods of
:class:`~torchrl_grpo.inference.servers.extension.WeightExtension`, and log-probabilities of the sampled
distribution.
"""

from __future__ import annotations

import itertools
import math
import queue
import time
import uuid
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.checksums import Checksums
from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Request, SteppingEngine
from torchrl_grpo.inference.servers.http import ServerConnection, ServerLost
from torchrl_grpo.inference.servers.weight_files import WeightFiles

# Longest duration of a step in which no response ends, in seconds.
_STEP_S = 0.2
# Seconds without an answer after which the server has to generate a token for a check.
_QUIET_S = 30.0
# A request that reaches the server after it was told to abort all is aborted this much later, in seconds.
_ABORT_AGAIN_S = 0.2
_GENERATE, _CALL = "/inference/v1/generate", "/collective_rpc"
# vLLM sends this in place of a log-probability that is not finite.
_NOT_FINITE = -9999.0


class ServerEngine(SteppingEngine):
    """The engine of one server.

    Args:
        connection: connection to the server; closed with the engine.
        dtype: dtype in which weights are published.
        folder: folder for weights on their way, which the server sees too.
        timeout_s: seconds within which the server must generate a token.

    Raises:
        ConfigError: the server refuses the key, or has another dtype.
        ServerLost: the server does not answer.
    """

    def __init__(
        self, connection: ServerConnection, *, dtype: torch.dtype, folder: Path, timeout_s: float
    ) -> None:
        self._connection = connection
        self._folder = folder
        self._timeout_s = timeout_s
        self._names = itertools.count()
        self._running: dict[str, Request] = {}
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        # What the server calls the weights that it was given last. Every answer names the weights of its
        # tokens, so a server that was restarted cannot pass for this one.
        self._weights_name: str | None = None
        # By the monotonic clock: when the server is checked if it has not answered before.
        self._next_check = time.monotonic() + _QUIET_S
        (described,) = self._call("grpo_describe")
        found, wanted = described["dtype"], str(dtype).removeprefix("torch.")
        if found != wanted:
            raise ConfigError(
                f"inference_model.dtype: the server at {connection.address} computes in {found}, and the run "
                f"publishes weights in {wanted}; write inference_model.dtype={found}, or start the server "
                f"with {wanted}"
            )

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

    def _on_answer(self, name: str, answer: Any) -> None:
        # This runs in the thread of the connection.
        self._answers.put((name, answer))

    def step(self) -> list[tuple[Hashable, Completion]]:
        """Wait a moment for responses that end, and return them.

        Raises:
            ServerLost: the server does not answer, or does not hold the weights that it was given.
        """
        return self._received(_STEP_S) if self._running else []

    def _received(self, wait_s: float) -> list[tuple[Hashable, Completion]]:
        """Return the completions that have arrived; wait for the first one."""
        ended = []
        try:
            arrived = [self._answers.get(timeout=wait_s)]
        except queue.Empty:
            self._check_alive()
            return []
        while not self._answers.empty():
            arrived.append(self._answers.get())
        self._next_check = time.monotonic() + _QUIET_S
        for name, answer in arrived:
            if isinstance(answer, BaseException):
                raise answer
            ended.append((self._running.pop(name).key, self._completion(answer)))
        return ended

    def _check_alive(self) -> None:
        """Have the server generate a token, if it has not answered for long.

        Raises:
            ServerLost: it does not do it in time.
        """
        if time.monotonic() < self._next_check:
            return
        body = _body([1], max_tokens=1, temperature=1.0, seed=0)
        self._connection.post(_GENERATE, body, timeout_s=self._timeout_s)
        self._next_check = time.monotonic() + _QUIET_S

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
        self._call("grpo_start_update")

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See :meth:`Engine.update`. Weights that lie in files are not copied."""
        files = weights if isinstance(weights, WeightFiles) else WeightFiles(self._folder).write(weights)
        for bucket in files.buckets:
            self._call("grpo_load", bucket=bucket.to_json())

    def finish_update(self) -> None:
        """See :meth:`Engine.finish_update`."""
        self._call("grpo_finish_update")
        self._weights_name = uuid.uuid4().hex
        self._connection.post("/update_weight_version", {"new_version": self._weights_name})
        self._connection.post("/resume")

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See :meth:`Engine.locate_weights`."""
        self._call("grpo_locate_weights", shapes={name: list(shape) for name, shape in shapes.items()})

    def checksums(self) -> tuple[Checksums, ...]:
        """See :meth:`Engine.checksums`."""
        found = self._call("grpo_checksums")
        return tuple(
            Checksums(one["dtype"], {name: tuple(values) for name, values in one["values"].items()})
            for one in found
        )

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


def _body(tokens: Sequence[int], **sampling: Any) -> dict[str, Any]:
    return {"token_ids": list(tokens), "sampling_params": {"detokenize": False, **sampling}}


def _log_prob(entry: dict[str, Any]) -> float:
    value: float = entry["logprob"]
    return math.nan if value == _NOT_FINITE and entry["rank"] is None else value
