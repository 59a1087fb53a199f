"""An engine in a server, which takes and gives token ids over HTTP.

The server must be started by a run or by ``grpo-serve``. It then has the methods of
:class:`~torchrl_grpo.inference.servers.vllm.extension.WeightExtension`, and returns log-probabilities of the
sampled distribution. What differs between kinds of servers is in
:mod:`~torchrl_grpo.inference.servers.api`.
"""

from __future__ import annotations

import itertools
import math
import queue
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.errors import ConfigError, ModelError
from torchrl_grpo.inference.checksums import Checksums, merge_ranks
from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Request, SteppingEngine
from torchrl_grpo.inference.servers.answers import fault_in
from torchrl_grpo.inference.servers.api import ServerApi
from torchrl_grpo.inference.servers.http import ServerConnection, ServerLost
from torchrl_grpo.inference.servers.model_identity import difference
from torchrl_grpo.inference.servers.transfer_types import INTERRUPTED, Opening
from torchrl_grpo.inference.servers.weight_files import Bucket, BucketSource, WeightFiles
from torchrl_grpo.inference.servers.weight_stream import TransferPostponed
from torchrl_grpo.inference.vllm_arguments import name_of

# Largest number of files that the server was told to load and has not loaded yet.
_FILES_AT_A_TIME = 2
# Longest duration of a step in which no response ends, in seconds.
_STEP_S = 0.2
# Seconds without an answer after which the server's engine is asked for a sign of life.
_QUIET_S = 30.0
# A request that reaches the server after it was told to abort all is aborted this much later, in seconds.
_ABORT_AGAIN_S = 0.2
# Largest size of an answer: of what it has once, and for each token. vLLM takes about 200 bytes for a token.
_ANSWER_BYTES, _TOKEN_BYTES = 2**24, 2**12


@dataclass(frozen=True)
class ServerRequirements:
    """What a server must compute with to give the same numbers as an engine in this process.

    Attributes:
        dtype: dtype in which weights are published.
        head_dtype: dtype of the output head's products; None for ``dtype``.
        max_model_len: longest prompt and response together.
        end_token_ids: tokens that end a response, for servers that need them in each request.
        model: description of the run's model, to be compared with that of the server's; None for a server
            that the run has started.
        vocabulary: number of tokens that the run's model has.
    """

    dtype: torch.dtype
    head_dtype: torch.dtype | None
    max_model_len: int
    end_token_ids: tuple[int, ...] = ()
    model: Mapping[str, Any] | None = None
    vocabulary: int = sys.maxsize


class ServerEngine(SteppingEngine):
    """The engine of one server.

    Args:
        connection: connection to the server; closed with the engine.
        api: routes of this kind of server.
        requirements: what the server must compute with.
        folder: folder for weights on their way.
        timeout_s: seconds within which the server's engine must answer.
        needs_folder: whether the server must see the folder.

    Raises:
        ConfigError: the server refuses the key, has another model, computes otherwise than wanted, or does
            not see the folder.
        ServerLost: the server does not answer.

    Attributes:
        identity: text that differs between servers.
        gpus: name of the GPU of each process (rank) of the engine; empty texts on a CPU.
    """

    def __init__(
        self,
        connection: ServerConnection,
        api: ServerApi,
        *,
        requirements: ServerRequirements,
        folder: Path,
        timeout_s: float,
        needs_folder: bool = True,
    ) -> None:
        self._connection = connection
        self._api = api
        self._end_token_ids, self._vocabulary = requirements.end_token_ids, requirements.vocabulary
        self._folder = folder
        self._timeout_s = timeout_s
        self._names = itertools.count()
        self._running: dict[str, Request] = {}
        self._answers: queue.SimpleQueue[tuple[str | None, Any]] = queue.SimpleQueue()
        # Name under which the server has the weights that it loaded last. Every answer names the weights that
        # sampled its tokens, so a server that was restarted is noticed.
        self._weights_name: str | None = None
        # When to ping a silent server, by the monotonic clock.
        self._next_check = time.monotonic() + _QUIET_S
        # Deadline for its reply; infinite if no ping is pending.
        self._lost_at = math.inf
        self._shapes: dict[str, tuple[int, ...]] = {}
        # Whether the server's own loader must load weights, because it changes some of them.
        self._by_loader = False
        # An earlier run may have ended in the middle of an update, and left requests behind.
        api.abort_all(connection)
        with tempfile.NamedTemporaryFile(prefix="torchrl-grpo-", dir=folder) as seen:
            names = None if requirements.model is None else list(requirements.model["tensors"])
            described, *others = self._call("grpo_describe", file=seen.name, tensors=names)
        api.resume(connection)
        self.identity: str = described["identity"]
        self.gpus: tuple[str, ...] = tuple(rank["gpu"] for rank in (described, *others))
        _check_described(connection.address, described, requirements, folder if needs_folder else None)
        self._ranks = 1 + len(others)
        if described["ranks"] != self._ranks:
            raise ConfigError(
                f"inference_model.servers: the server at {connection.address} divides its model among "
                f"{described['ranks']} processes, and weights reach {self._ranks} of them; start it with "
                "grpo-serve and the arguments of this run"
            )

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            name = str(next(self._names))
            self._running[name] = request
            most_bytes = _ANSWER_BYTES + _TOKEN_BYTES * request.max_new_tokens
            call = replace(self._api.generate(request, self._end_token_ids), most_bytes=most_bytes)
            self._connection.send_later(call, partial(self._on_answer, name))

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
                request = self._running.pop(name)
                ended.append((request.key, self._completion(request, answer)))
        return ended

    def _watch(self) -> None:
        """Ask a server that has been quiet for a sign of life, without waiting for it.

        The engine answers between two of its steps. The request does not count as a running response. So a
        server answers it even if it runs as many responses as it can.

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
            self._connection.send_later(self._api.sign_of_life, partial(self._on_answer, None))

    def _completion(self, request: Request, answer: Any) -> Completion:
        sampled = self._api.sampled(request, answer)
        fault = fault_in(sampled.completion, request.max_new_tokens, self._vocabulary)
        if fault is not None:
            raise ServerLost(f"{self._connection.address} answered with {fault}")
        named = self._weights_name is not None and sampled.completion.token_ids
        if named and sampled.weights != {self._weights_name}:
            raise ServerLost(
                f"{self._connection.address} generated with weights {sorted(sampled.weights)} and was given "
                f"{self._weights_name}: it was restarted, or another run uses it"
            )
        return sampled.completion

    def abort_all(self) -> dict[Hashable, Completion]:
        completions: dict[Hashable, Completion] = {}
        while self._running:
            self._api.abort_all(self._connection)
            completions.update(self._received(_ABORT_AGAIN_S))
        return completions

    def next_tokens(self, probe: Probe) -> ProbeResult:
        rows = []
        for request in probe.requests():
            call = self._api.likeliest(request, probe.top_k)
            answer = self._connection.send(call, timeout_s=self._timeout_s)
            rows.append(self._api.read_likeliest(answer, probe.top_k))
        return ProbeResult(
            torch.tensor([row.token_ids for row in rows]),
            torch.tensor([row.log_probs for row in rows]),
            cached_tokens=rows[0].cached_tokens,
        )

    def start_update(self) -> None:
        self._start(shares_cpu=False)

    def _start(self, shares_cpu: bool) -> None:
        # Requests of other clients are frozen, and go on with the new weights.
        self._api.pause(self._connection)
        self._call("grpo_start_update", by_loader=self._by_loader, shares_cpu=shares_cpu)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See :meth:`Engine.load_weights`. The server generates until the first weights are there."""
        source = self._in_buckets(weights)
        with closing(source.buckets()) as buckets:
            first = next(buckets, None)
            self._start(source.shares_cpu)
            self._load(itertools.chain([first], buckets))
        self.finish_update()

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See :meth:`Engine.update`. Weights that lie in files are not copied."""
        # The writer of the buckets waits until this reader has ended. So end it after an error as well.
        with closing(self._in_buckets(weights).buckets()) as buckets:
            self._load(buckets)

    def _in_buckets(self, weights: Iterable[tuple[str, Tensor]]) -> BucketSource:
        return weights if isinstance(weights, BucketSource) else WeightFiles(self._folder).write(weights)

    def _load(self, buckets: Iterable[Bucket | Opening | None]) -> None:
        """Let the server load buckets in their order.

        While the server loads a file, it already gets the request to load the next one. So it does not wait
        between two files.
        """
        outstanding: deque[Future[list[Any]]] = deque()
        # At its end, this block waits until the server has answered all outstanding requests.
        with ThreadPoolExecutor(_FILES_AT_A_TIME) as threads:
            for item in buckets:
                max_outstanding = 0
                if isinstance(item, Opening):
                    outstanding.append(threads.submit(self._call, "grpo_open", opening=item.to_json()))
                elif item is not None:
                    outstanding.append(threads.submit(self._call, "grpo_load", bucket=item.to_json()))
                    # A file in a folder may arrive late, and each request has a time limit.
                    is_here = item.slot is None and item.checksum is None
                    max_outstanding = _FILES_AT_A_TIME - 1 if is_here else 0
                while len(outstanding) > max_outstanding:
                    _check_not_interrupted(outstanding.popleft().result())
            while outstanding:
                _check_not_interrupted(outstanding.popleft().result())

    def try_out(self, item: Bucket | Opening) -> None:
        """Have every rank receive an item of a trial.

        Raises:
            RuntimeError: a rank could not receive it.
        """
        name = "opening" if isinstance(item, Opening) else "bucket"
        for error in self._call("grpo_try", **{name: item.to_json()}):
            if error is not None:
                raise RuntimeError(error)

    def finish_update(self) -> None:
        self._call("grpo_finish_update")
        self._weights_name = uuid.uuid4().hex
        self._api.name_weights(self._connection, self._weights_name)
        self._api.resume(self._connection)

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._call("grpo_locate_weights", shapes={name: list(shape) for name, shape in shapes.items()})
        if self._ranks == 1:
            return
        ranks = [Checksums.from_json(held) for held in self._call("grpo_held")]
        whole = merge_ranks(ranks, self._shapes)
        missing = [name for name in shapes if name not in whole.values]
        for name in missing:
            if any(rank.values.get(name) or rank.parts.get(name) for rank in ranks):
                raise _loading_error(self._connection.address, f"only a part of {name}")
        self._by_loader = bool(missing)
        if missing:
            ignored = [set(names) for names in self._call("grpo_ignored", names=missing)]
            for name in missing:
                if all(name in names for names in ignored):
                    raise _loading_error(self._connection.address, f"nothing of {name}")

    def checksums(self) -> tuple[Checksums, ...]:
        ranks = [Checksums.from_json(held) for held in self._call("grpo_checksums")]
        return (merge_ranks(ranks, self._shapes),)

    def reset_cache(self) -> None:
        self._api.reset_cache(self._connection)

    def sleep(self) -> None:
        self._api.sleep(self._connection)

    def wake(self) -> None:
        self._api.wake(self._connection)

    def close(self) -> None:
        """Close the connection. Whoever has started the server ends it."""
        self._connection.close()

    def _call(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker of the server, and return the results."""
        return self._api.call(self._connection, method, arguments, self._folder)


def _check_described(
    address: str, described: Mapping[str, Any], requirements: ServerRequirements, folder: Path | None
) -> None:
    """Compare what a server says of itself with what it must be; ``folder`` None skips that check."""
    dtype = name_of(requirements.dtype)
    start = f"inference_model.servers: the server at {address}"
    again = "start it with grpo-serve and the arguments of this run"
    # First, because the other checks advise to change keys of the run.
    if (
        requirements.model is not None
        and (other := difference(requirements.model, described["model"])) is not None
    ):
        raise ConfigError(
            f"{start} was started with another model, {described['model']['source']}, than this run "
            f"({requirements.model['source']}): {other}; {again}, or write its model.name here"
        )
    if described["dtype"] != dtype:
        raise ConfigError(
            f"{start} computes in {described['dtype']}, and the run publishes weights in {dtype}; write "
            f"inference_model.dtype={described['dtype']}, or {again}"
        )
    head = dtype if requirements.head_dtype is None else name_of(requirements.head_dtype)
    if described["head_dtypes"] != [head]:
        raise ConfigError(
            f"{start} computes logits in {', '.join(described['head_dtypes'])}, and the run needs {head} "
            f"(inference_model.head_dtype); {again}"
        )
    if described["max_model_len"] < requirements.max_model_len:
        raise ConfigError(
            f"{start} takes {described['max_model_len']} tokens, and the run needs "
            f"inference_model.max_model_len={requirements.max_model_len}; write "
            f"inference_model.max_model_len={described['max_model_len']}, or {again}"
        )
    if described["logprobs_mode"] != "processed_logprobs":
        raise ConfigError(
            f"{start} returns {described['logprobs_mode']}, and the run needs processed_logprobs, the "
            f"log-probabilities of the distribution that is sampled; {again}"
        )
    if folder is not None and not described["sees_file"]:
        raise ConfigError(
            f"{start} does not see files in {folder}, through which weights travel; start it on this "
            "machine, and in the same container, or write inference_model.weight_transfer=folder and "
            "inference_model.weight_folder=FOLDER, which both see, or inference_model.weight_transfer=nccl"
        )


def _check_not_interrupted(answers: Sequence[Any]) -> None:
    if INTERRUPTED in answers:
        raise TransferPostponed("another server has left while weights were sent")


def _loading_error(address: str, what: str) -> ModelError:
    return ModelError(
        f"inference_model.backend=vllm_server: of the published weights, the ranks of {address} load {what}; "
        "write inference_model.tensor_parallel_size=1 and inference_model.pipeline_parallel_size=1"
    )
