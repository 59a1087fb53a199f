"""Parts that talk to servers: answers, publication, and what they leave to the trainer."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.scale.parts import Part, microseconds, seconds
from torchrl_grpo.inference.protocol import Request
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.engine import ServerEngine, ServerRequirements
from torchrl_grpo.inference.servers.http import ServerConnection
from torchrl_grpo.inference.servers.transfer_types import Opening
from torchrl_grpo.inference.servers.vllm.api import VLLMApi
from torchrl_grpo.inference.servers.weight_files import Bucket
from torchrl_grpo.inference.servers.weight_stream import Halves, StreamReader, WeightStream

_TOKENS = 1_000
# A model of 7B parameters in bfloat16, and its number of tensors.
_MODEL_BYTES, _MODEL_TENSORS = 15_200_000_000, 339
# Most halves that a publication is measured with; the cost of the others is the same.
_MOST_HALVES = 16


@contextmanager
def _server(tokens: int, connections: int) -> Iterator[list[ServerConnection]]:
    """Start a server in a process of its own, and yield connections to it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/server"
        command = [sys.executable, "-m", "benchmarks.scale.server", socket, str(tokens)]
        process = subprocess.Popen(command)
        try:
            made = [ServerConnection(f"unix:{socket}", "key", 600.0) for _ in range(connections)]
            made[0].wait_until_up(300.0)
            yield made
            for connection in made:
                connection.close()
        finally:
            process.kill()
            process.wait()


def _engines(connections: Sequence[ServerConnection]) -> list[ServerEngine]:
    requirements = ServerRequirements(torch.bfloat16, None, 1_000)
    return [
        ServerEngine(
            connection,
            VLLMApi(),
            requirements=requirements,
            folder=Path(tempfile.gettempdir()),
            timeout_s=60.0,
        )
        for connection in connections
    ]


def _requests(count: int) -> list[Request]:
    prompt = list(range(500))
    return [Request(number, prompt, _TOKENS, 1.0, number) for number in range(count)]


def _take(engine: ServerEngine, count: int) -> None:
    while count:
        count -= len(engine.step())


def _answers(tokens: int) -> float:
    """Return the processor time for the answers to requests of so many tokens in all."""
    count = tokens // _TOKENS
    with _server(_TOKENS, 4) as connections:
        engines = _engines(connections)
        start = time.process_time()
        for engine in engines:
            engine.submit(_requests(count // len(engines)))
        for engine in engines:
            _take(engine, count // len(engines))
        return time.process_time() - start


class _NoHalves(Halves):
    """Halves that hold no bytes, with the descriptions that a model of 7B parameters has."""

    on_this_machine = True
    by_cpu = False
    room = 1

    def __init__(self, entries: int) -> None:
        self._entries = entries

    def open(self, servers: Sequence[Hashable]) -> Mapping[Hashable, Opening]:
        return {}

    def write(self, slot: int, pieces: Any) -> Bucket:
        entry = ("model.layers.0.mlp.up_proj.weight", "bfloat16", (18_944, 3_584), 0, 0, 16_777_216)
        return Bucket("", (entry,) * self._entries, slot=slot)

    def close(self) -> None:
        """Nothing to delete."""


def _publication(servers: int) -> float:
    """Return the processor time of a publication of 7B parameters to servers, without its bytes."""
    halves = math.ceil(_MODEL_BYTES / (weight_files.BUCKET_BYTES // 2))
    measured = min(halves, _MOST_HALVES)
    with _server(1, servers) as connections:
        engines = _engines(connections)
        entries = math.ceil(_MODEL_TENSORS / halves)
        weights = [(str(number), torch.zeros(1)) for number in range(measured)]
        stream = WeightStream(weights, _NoHalves(entries), lambda error: error)
        ended: Future[None] = Future()
        left = [servers]
        lock = threading.Lock()

        def read(engine: ServerEngine, reader: StreamReader) -> None:
            engine.update(reader)
            reader.mark_done()
            with lock:
                left[0] -= 1
                if not left[0]:
                    ended.set_result(None)

        readers = [stream.reader_for(number) for number in range(servers)]
        start = time.process_time()
        for each in zip(engines, readers, strict=True):
            threading.Thread(target=read, args=each, daemon=True).start()
        stream.send_until(ended)
        return (time.process_time() - start) * halves / measured


def _small_calls(seconds: float) -> tuple[float, float]:
    """Return how many small operators a second a loop launches, and its longest pause in seconds."""
    tensor, count, longest = torch.zeros(64), 0, 0.0
    last = time.perf_counter()
    end = last + seconds
    while last < end:
        tensor.add_(1)
        count += 1
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return count / seconds, longest


def _lost_speed(rate: int) -> float:
    """Return the share of their speed that small operators lose while tokens arrive at a rate."""
    with _server(_TOKENS, 8) as connections:
        engines = _engines(connections)
        alone, _ = _small_calls(2.0)
        stop = threading.Event()

        def generate() -> None:
            number = 0
            while not stop.wait(_TOKENS / rate):
                engines[number % len(engines)].submit(_requests(1))
                number += 1

        def take(engine: ServerEngine) -> None:
            while not stop.is_set():
                engine.step()
                stop.wait(0.001)

        for target, args in [(generate, ()), *((take, (engine,)) for engine in engines)]:
            threading.Thread(target=target, args=args, daemon=True).start()
        _small_calls(0.5)
        beside, longest = _small_calls(6.0)
        stop.set()
        print(f"longest pause {longest * 1e3:.0f} ms", file=sys.stderr)
        return max(1e-3, 1 - beside / alone)


PARTS = {
    "answers": Part(
        "answers of servers", "tokens", (40_000, 160_000, 640_000), _answers, microseconds("token")
    ),
    "publication": Part(
        "control of a publication of 7B parameters", "servers", (8, 32, 128), _publication, seconds
    ),
    "calls": Part(
        "small operators of the trainer beside 8 servers",
        "tokens/s",
        (24_000,),
        _lost_speed,
        lambda _, lost: f"{1 - lost:.0%} of their speed",
    ),
}
