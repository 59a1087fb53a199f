"""Parts that talk to servers: answers, publication, and what they leave to the trainer."""

from __future__ import annotations

import itertools
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.scale import collection, rounds
from benchmarks.scale.parts import Part, fastest, microseconds, total
from benchmarks.scale.server import PROMPT_TOKENS
from torchrl_grpo.config.judges import JudgeConfig
from torchrl_grpo.data.control_texts import USUAL
from torchrl_grpo.envs.responses import written_texts
from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.protocol import Request
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.engine import ServerEngine, ServerRequirements
from torchrl_grpo.inference.servers.http import Call, ServerConnection
from torchrl_grpo.inference.servers.transfer_types import Channel, Opening
from torchrl_grpo.inference.servers.vllm.api import VLLMApi
from torchrl_grpo.inference.servers.weight_files import Bucket
from torchrl_grpo.inference.servers.weight_folder import FolderWeights
from torchrl_grpo.inference.servers.weight_stream import Halves, StreamReader, WeightStream
from torchrl_grpo.rewards.judge.reward import ScoringJudge
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup

_TOKENS = 1_000
_PAIRS = 48


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


def _generated(engine: ServerEngine, samples: int) -> Group:
    """Return a group of which a server has generated all responses."""
    prompt = list(range(PROMPT_TOKENS))
    group = Group(0, prompt, 0, [Response() for _ in range(samples)])
    engine.submit([Request(number, prompt, _TOKENS, 1.0, number) for number in range(samples)])
    while not group.is_finished:
        for number, completion in engine.step():
            group.responses[cast(int, number)].extend(completion, 0)
    return group


def _tokens(tokens: int) -> float:
    """Return the processor time of so many tokens from requests to servers to the trainer's tensors."""
    with _server(_TOKENS, 4) as connections:
        engines, decoder = _engines(connections), rounds.tokenizer()

        def receive() -> None:
            ended: list[ScoredGroup] = []
            for number in range(tokens // (_TOKENS * rounds.SAMPLES)):
                group = _generated(engines[number % len(engines)], rounds.SAMPLES)
                ended.append(rounds.scored(group, written_texts(decoder, group.responses)))
                assert group.oldest_version is not None
            rounds.build(ended)

        return fastest(receive)


def _judged(responses: int) -> float:
    """Return how many requests a judge that takes a second had at a time, as a run sends them by default."""
    with _server(1, 1) as (connection,):
        server = SimpleNamespace(
            address=connection.address, key=None, control=USUAL, identity="", close=lambda: None
        )
        judge = ScoringJudge("judge", JudgeConfig(model="judge"), None, None, cast(Any, server))
        collection.score_all(RewardSet([(judge, 1.0)], group_size=collection.SAMPLES), responses)
        return float(connection.send(Call("/most", verb="GET")))


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
        return Bucket("", _entries(pieces), slot=slot)

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
    return _publish(8, _NoBytes(), _weights(gigabytes))


def _weights(gigabytes: int) -> list[tuple[str, Tensor]]:
    """Return weights in bfloat16 that have shapes and no content."""
    rows, width = 18_944, 3_584
    tensors = -(-gigabytes * 10**9 // (rows * width * 2))
    tensor = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    return [(f"model.layers.{number}.mlp.up_proj.weight", tensor) for number in range(tensors)]


def _entries(pieces: Sequence[Piece]) -> tuple[Any, ...]:
    return tuple((each.name, "bfloat16", each.shape, 0, each.first, len(each.content)) for each in pieces)


class _UnwrittenFolder(FolderWeights):
    """Weights in a folder, whose files are named and not written."""

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> FolderWeights:
        """See :meth:`FolderWeights.write`."""
        sizes = weight_files.BUCKET_BYTES, self._most_bytes, weight_files.PART_OF_FILES
        for number, pieces in enumerate(weight_files.divide(weights, *sizes)):
            self._buckets.append(Bucket(str(number), _entries(pieces), checksum=0))
        return self


def _by_folder(servers: int) -> float:
    """Return the processor time of a publication of 15 GB through a folder, but for its bytes."""
    with (
        _server(1, servers) as connections,
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(servers) as threads,
    ):
        engines = _engines(connections)
        start = time.process_time()
        weights = _UnwrittenFolder(Path(folder), servers).write(_weights(15))
        list(threads.map(lambda engine: engine.load_weights(weights), engines))
        return time.process_time() - start


def _small_calls(seconds: float) -> float:
    """Return how many small operators a second a loop launches."""
    tensor, count = torch.zeros(64), 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        tensor.add_(1)
        count += 1
    return count / seconds


def _lost_speed(rate: int) -> float:
    """Return the share of their speed that small operators lose while tokens arrive at a rate.

    Times without and with tokens alternate, and the median counts: other processes slow both.
    """
    with _server(_TOKENS, 8) as connections:
        engines, decoder = _engines(connections), rounds.tokenizer()
        period = len(engines) * _TOKENS / rate
        arriving, stop = threading.Event(), threading.Event()

        def generate(number: int) -> None:
            due = time.monotonic() + period * number / len(engines)
            while not stop.wait(max(0.0, due - time.monotonic())):
                if arriving.is_set():
                    written_texts(decoder, _generated(engines[number], 1).responses)
                due += period

        threads = [threading.Thread(target=generate, args=(number,)) for number in range(len(engines))]
        for thread in threads:
            thread.start()

        def speed(with_tokens: bool) -> float:
            (arriving.set if with_tokens else arriving.clear)()
            _small_calls(period)
            return _small_calls(2 * period)

        kept = [speed(True) / speed(False) for _ in range(_PAIRS)]
        stop.set()
        for thread in threads:
            thread.join()
        low, middle, high = statistics.quantiles(kept, n=4)
        print(f"quartiles of {_PAIRS} pairs: {low:.2f}, {middle:.2f}, {high:.2f}", file=sys.stderr)
        return max(1e-3, 1 - middle)


PARTS = {
    "servers": Part(
        "tokens of servers: answer, text, round", "tokens", (64_000, 640_000), _tokens,
        microseconds, "µs a token", target=1.5, repeats=3,
    ),
    "judge": Part(
        "a judge that takes a second", "responses", (1_024,), _judged,
        total, "responses in flight", target=256, is_least=True,
    ),
    "publication": Part(
        "control of a publication by NCCL", "servers", (16, 64, 256), _by_nccl,
        total, "s", target=2.0, repeats=7,
    ),
    "halves": Part(
        "control of a publication to 8 servers in shared memory", "GB", (1, 4, 16), _by_shared_memory,
        total, "s", repeats=3,
    ),
    "folder": Part(
        "control of a publication of 15 GB through a folder", "servers", (8, 32, 128), _by_folder,
        total, "s", repeats=3,
    ),
    "calls": Part(
        "small operators of the trainer beside 8 servers", "tokens/s", (24_000,), _lost_speed,
        lambda _, lost: 100 * (1 - lost), "% of their speed", target=90, is_least=True,
    ),
}  # fmt: skip
