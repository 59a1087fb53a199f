"""Parts that talk to servers: answers, publication, and what they leave to the trainer."""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.scale.parts import Part, microseconds, seconds
from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.protocol import Request
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.engine import ServerEngine, ServerRequirements
from torchrl_grpo.inference.servers.http import ServerConnection
from torchrl_grpo.inference.servers.transfer_types import Channel, Opening
from torchrl_grpo.inference.servers.vllm.api import VLLMApi
from torchrl_grpo.inference.servers.weight_files import Bucket
from torchrl_grpo.inference.servers.weight_stream import Halves, StreamReader, WeightStream

_TOKENS = 1_000


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
    at_a_time = 10
    with _server(_TOKENS, 4) as connections:
        engines = _engines(connections)
        start = time.process_time()
        for _ in range(tokens // (_TOKENS * at_a_time * len(engines))):
            for engine in engines:
                engine.submit(_requests(at_a_time))
            for engine in engines:
                _take(engine, at_a_time)
        return time.process_time() - start


class _Announced(Channel):
    """A channel as NCCL is: each server is told once to receive, and gets no bytes here."""

    on_this_machine = False
    by_cpu = False

    def send(self, weights: Iterable[tuple[str, Tensor]], stream: WeightStream) -> bool:
        """Tell all servers of the pass."""
        opening = Opening("nccl", {"host": "127.0.0.1", "port": 1, "rank": 1, "size": 2, "room": 2**25})
        stream.announce(dict.fromkeys(stream.readers(), opening))
        return True

    def close(self) -> None:
        """Nothing to end."""


class _NoBytes(Halves):
    """The halves of a transfer buffer, each of which is described and not written."""

    on_this_machine = True
    by_cpu = False
    room = weight_files.BUCKET_BYTES // 2
    most_room = weight_files.MOST_BYTES

    def write(self, slot: int, pieces: Sequence[Piece]) -> Bucket:
        entries = [(each.name, "bfloat16", each.shape, 0, each.first, len(each.content)) for each in pieces]
        return Bucket("", tuple(entries), slot=slot)

    def close(self) -> None:
        """Nothing to delete."""


def _publish(servers: int, channel: Channel, weights: Sequence[tuple[str, Tensor]]) -> float:
    """Return the processor time of a publication, but for its bytes."""
    with _server(1, servers) as connections:
        engines = _engines(connections)
        stream = WeightStream(weights, channel, lambda error: error)
        ended: Future[None] = Future()
        loaded = itertools.count(1)
        lock = threading.Lock()

        def load(engine: ServerEngine, reader: StreamReader) -> None:
            engine.load_weights(reader)
            reader.mark_done()
            with lock:
                if next(loaded) == servers:
                    ended.set_result(None)

        readers = [stream.reader_for(number) for number in range(servers)]
        start = time.process_time()
        for each in zip(engines, readers, strict=True):
            threading.Thread(target=load, args=each, daemon=True).start()
        stream.send_until(ended)
        return time.process_time() - start


def _by_nccl(servers: int) -> float:
    return _publish(servers, _Announced(), [])


def _by_shared_memory(gigabytes: int) -> float:
    """Return the processor time for 8 servers and a model of so many bytes in bfloat16."""
    rows, width = 18_944, 3_584
    tensors = -(-gigabytes * 10**9 // (rows * width * 2))
    tensor = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    return _publish(8, _NoBytes(), [(f"model.layers.{n}.mlp.up_proj.weight", tensor) for n in range(tensors)])


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
    "publication": Part("control of a publication by NCCL", "servers", (16, 64, 256), _by_nccl, seconds),
    "halves": Part(
        "control of a publication to 8 servers in shared memory",
        "GB",
        (1, 4, 16),
        _by_shared_memory,
        seconds,
    ),
    "calls": Part(
        "small operators of the trainer beside 8 servers",
        "tokens/s",
        (24_000,),
        _lost_speed,
        lambda _, lost: f"{1 - lost:.0%} of their speed",
    ),
}
