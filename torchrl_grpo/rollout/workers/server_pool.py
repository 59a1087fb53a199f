"""Rollout workers in threads of the trainer's process, each with the engine of one vLLM server.

The threads wait for answers most of the time, so they cost the trainer little. Servers are processes of their
own: those that the pool starts, or those that ``inference_model.servers`` names.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.config import Config
from torchrl_grpo.envs.episodes.build import with_episodes
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.build import server_arguments
from torchrl_grpo.inference.servers.engine import ServerEngine
from torchrl_grpo.inference.servers.http import ServerConnection
from torchrl_grpo.inference.servers.process import ServerProcess
from torchrl_grpo.inference.servers.require_key import KEY_VARIABLE
from torchrl_grpo.inference.servers.weight_files import WeightFiles
from torchrl_grpo.models.precision import resolve_dtype
from torchrl_grpo.planning.cores import visible_gpus, worker_env
from torchrl_grpo.rollout.workers.types import Command
from torchrl_grpo.rollout.workers.worker import RolloutWorker
from torchrl_grpo.runtime import screen

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class ServerSpec:
    """What the servers of a run are started with.

    Attributes:
        cfg: configuration of the run.
        source: folder or hub name of the model.
        addresses: servers that somebody else has started; empty if the pool starts its own.
        gpus: number of the GPU of each server that the pool starts; empty on a CPU.
        device: device of an engine, as its own process names it.
        max_num_seqs: largest number of responses decoded at a time.
        threads: CPU threads of each server.
        gpu_memory_utilization: share of a GPU's memory that vLLM takes.
        start_limit_s: seconds within which a server must be ready.
    """

    cfg: Config
    source: str
    addresses: Sequence[str]
    gpus: Sequence[int]
    device: torch.device
    max_num_seqs: int
    threads: int
    gpu_memory_utilization: float
    start_limit_s: float


class _Member:
    """One worker: its thread, its connection, and its server if the pool has started it."""

    def __init__(self, spec: ServerSpec, index: int, done: Callable[[Any], None]) -> None:
        self._spec, self._index = spec, index
        self._inbox: queue.SimpleQueue[tuple[Command, Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._process: ServerProcess | None = None
        self._connection: ServerConnection | None = None
        self._ending = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(done,), name=f"server {index}", daemon=True)
        self._thread.start()

    def call(self, command: Command, done: Callable[[Any], None]) -> None:
        self._inbox.put((command, done))

    def end(self) -> None:
        """End the thread, the connection, and the server if it belongs to the run."""
        with self._ending:
            self._ended = True
            if self._process is not None:
                self._process.kill()
            if self._connection is not None:
                self._connection.close()
        self._inbox.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self, done: Callable[[Any], None]) -> None:
        try:
            worker = self._build_worker()
        except Exception as error:  # noqa: BLE001  it is reported
            done(error)
            return
        done(None)
        while (job := self._inbox.get()) is not None:
            command, report = job
            try:
                result: Any = worker.run(command)
            except Exception as error:  # noqa: BLE001  it is reported
                result = error
            report(result)

    def _build_worker(self) -> RolloutWorker:
        spec = self._spec
        options = spec.cfg.inference_model
        if spec.addresses:
            address, key = spec.addresses[self._index], os.environ.get(KEY_VARIABLE, "")
        else:
            process = self._start_server()
            process.wait_until_ready(spec.start_limit_s)
            address, key = process.address, process.key
        with self._ending:
            if self._ended:
                raise InterruptedError("the worker was ended while it started")
            self._connection = ServerConnection(address, key, spec.cfg.collector.timeout_s)
        # A server of this run is ready a moment before it listens.
        self._connection.wait_until_up(spec.start_limit_s)
        engine = ServerEngine(
            self._connection,
            dtype=resolve_dtype(options.dtype, spec.device),
            folder=_SHARED_MEMORY,
            timeout_s=spec.cfg.collector.timeout_s,
        )
        return RolloutWorker(
            with_episodes(spec.cfg, engine, spec.max_num_seqs),
            options.max_new_tokens,
            options.temperature,
            time.perf_counter,
        )

    def _start_server(self) -> ServerProcess:
        spec = self._spec
        environment = worker_env(spec.threads)
        if spec.gpus:
            environment |= visible_gpus([spec.gpus[self._index]])
        log = screen.log_file()
        with self._ending:
            if self._ended:
                raise InterruptedError("the worker was ended while it started")
            self._process = ServerProcess(
                spec.source,
                server_arguments(
                    spec.cfg,
                    spec.device,
                    max_num_seqs=spec.max_num_seqs,
                    gpu_memory_utilization=spec.gpu_memory_utilization,
                ),
                on_cpu=spec.device.type == "cpu",
                environment=environment,
                log=None if log is None else log.with_name(f"server-{self._index}.log"),
            )
        return self._process


class ServerPool:
    """A :class:`~torchrl_grpo.rollout.workers.types.Pool` of vLLM servers.

    Args:
        spec: what the servers are started with.
        count: number of servers.
    """

    def __init__(self, spec: ServerSpec, count: int) -> None:
        self._spec = spec
        self._members: list[_Member | None] = [None] * count

    def start(self, worker_index: int, done: Callable[[Any], None]) -> None:
        """See :class:`~torchrl_grpo.rollout.workers.types.Pool`."""
        self._members[worker_index] = _Member(self._spec, worker_index, done)

    def call(self, worker_index: int, command: Command, done: Callable[[Any], None]) -> None:
        """See :class:`~torchrl_grpo.rollout.workers.types.Pool`."""
        member = self._members[worker_index]
        assert member is not None
        member.call(command, done)

    def put_weights(self, weights: Iterable[tuple[str, Tensor]]) -> WeightFiles:
        """Write weights where every server reads them; the files last as long as the result.

        Raises:
            ConfigError: there is no room.
        """
        try:
            return WeightFiles(_SHARED_MEMORY).write(weights)
        except OSError as error:
            raise ConfigError(
                f"inference_model.backend=vllm_server: weights travel through {_SHARED_MEMORY}, which has no "
                f"room for them ({error.strerror}); enlarge it (docker run --shm-size=16g), or write "
                "inference_model.backend=vllm"
            ) from error

    def kill(self, worker_index: int) -> None:
        """See :class:`~torchrl_grpo.rollout.workers.types.Pool`."""
        member = self._members[worker_index]
        if member is not None:
            member.end()

    def close(self) -> None:
        """See :class:`~torchrl_grpo.rollout.workers.types.Pool`."""
        members = [member for member in self._members if member is not None]
        for member in members:
            member.end()
        for member in members:
            member.join()
