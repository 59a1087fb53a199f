"""Rollout workers in threads of the trainer's process, each with the engine of one server.

The threads wait for answers most of the time, so they cost the trainer little. Servers are processes of their
own: those that the pool starts, or those that ``inference_model.servers`` names.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks.engine import LOOPBACK
from torchrl_grpo.envs.episodes.build import with_episodes
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.servers.carriers import Carrier, CopyCarrier, FolderCarrier, StreamCarrier
from torchrl_grpo.inference.servers.channels import trial
from torchrl_grpo.inference.servers.channels.cuda_ipc import SharedHalves
from torchrl_grpo.inference.servers.channels.nccl import Broadcaster
from torchrl_grpo.inference.servers.engine import ServerEngine, ServerRequirements
from torchrl_grpo.inference.servers.http import ServerConnection, ServerLost
from torchrl_grpo.inference.servers.kinds import ServerKind, server_kind
from torchrl_grpo.inference.servers.model_identity import describe
from torchrl_grpo.inference.servers.process import ServerProcess
from torchrl_grpo.inference.servers.weight_stream import StreamReader, WeightStream
from torchrl_grpo.models.precision import resolve_dtype, resolve_head
from torchrl_grpo.planning.cores import visible_gpus, worker_env
from torchrl_grpo.rollout.workers.types import Command, LoadWeightsCommand
from torchrl_grpo.rollout.workers.worker import RolloutWorker
from torchrl_grpo.runtime import screen

# Seconds without an answer after which a run says that it waits for a server.
_SILENT_S = 3.0
# Seconds that servers get to end in good order at the end of a run.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class ServerSpec:
    """What the servers of a run are started with.

    Attributes:
        cfg: configuration of the run.
        source: folder or hub name of the model.
        addresses: servers that somebody else has started; empty if the pool starts its own.
        gpus: numbers of the GPUs of the servers that the pool starts, server by server; empty on a CPU.
        engine_size: number of GPUs of each.
        weight_transfer: how weights travel, a value of ``inference_model.weight_transfer``.
        train_device: where the trainer's weights are.
        device: device of an engine, by its name inside the engine's process.
        max_num_seqs: largest number of responses decoded at a time.
        threads: CPU threads of each server.
        gpu_memory_utilization: share of a GPU's memory that a server takes.
        eos_token_ids: tokens that end a response.
        vocabulary: number of tokens that the model has.
        start_limit_s: seconds within which a server must be ready.
    """

    cfg: Config
    source: str
    addresses: Sequence[str]
    gpus: Sequence[int]
    engine_size: int
    weight_transfer: str
    train_device: torch.device
    device: torch.device
    max_num_seqs: int
    threads: int
    gpu_memory_utilization: float
    eos_token_ids: Sequence[int]
    vocabulary: int
    start_limit_s: float

    @property
    def kind(self) -> ServerKind:
        """Kind of the servers."""
        return server_kind(self.cfg.inference_model.engine)


class _Member:
    """One worker: its thread, its connection, and its server if the pool has started it."""

    def __init__(self, pool: ServerPool, index: int, done: Callable[[Any], None]) -> None:
        self._pool, self._index = pool, index
        self._inbox: queue.SimpleQueue[tuple[Command, Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._process: ServerProcess | None = None
        self._connection: ServerConnection | None = None
        self.engine: ServerEngine | None = None
        self._ending = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(done,), name=f"server {index}", daemon=True)
        self._thread.start()

    def call(self, command: Command, done: Callable[[Any], None]) -> None:
        if isinstance(command, LoadWeightsCommand) and isinstance(command.content, WeightStream):
            command = replace(command, content=command.content.reader_for(self))
        self._inbox.put((command, done))

    def terminate(self) -> None:
        """Ask a server of the run to end; :meth:`end` waits for it."""
        with self._ending:
            if self._process is not None:
                self._process.terminate()

    def end(self, patience_s: float = 0.0) -> None:
        """End the thread, the connection, and the server if it belongs to the run."""
        with self._ending:
            self._ended = True
            self._pool.carrier.dismiss(self)
            if self._connection is not None:
                self._connection.close()
            if self._process is not None:
                self._process.kill(patience_s)
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
            finally:
                if isinstance(command, LoadWeightsCommand) and isinstance(command.content, StreamReader):
                    command.content.mark_done()
            report(result)
        worker.close()

    def _build_worker(self) -> RolloutWorker:
        spec = self._pool.spec
        options, timeout_s = spec.cfg.inference_model, spec.cfg.collector.timeout_s
        if spec.addresses:
            address, key = spec.addresses[self._index], os.environ.get(spec.kind.engine.api_key_variable, "")
        else:
            process = self._start_server()
            process.wait_until_ready(spec.start_limit_s)
            address, key = process.address, process.key
        with self._ending:
            if self._ended:
                raise InterruptedError("the worker was ended while it started")
            self._connection = ServerConnection(address, key, timeout_s, spec.kind.engine.api_key_variable)
        self._wait_until_up(self._connection)
        requirements = ServerRequirements(
            resolve_dtype(options.dtype, spec.device),
            resolve_head(options.head_dtype),
            options.max_model_len,
            tuple(spec.eos_token_ids),
            self._pool.model,
            spec.vocabulary,
        )
        engine = self.engine = ServerEngine(
            self._connection,
            spec.kind.api,
            requirements=requirements,
            folder=self._pool.folder,
            timeout_s=timeout_s,
            needs_folder=self._pool.carrier.needs_folder,
        )
        self._pool.claim(self._index, engine.identity)
        with self._ending:
            if self._ended:
                raise InterruptedError("the worker was ended while it started")
            self._pool.admit(self, address, engine.gpus)
        return RolloutWorker(
            with_episodes(spec.cfg, engine, spec.max_num_seqs),
            options.max_new_tokens,
            options.temperature,
            time.perf_counter,
        )

    def _wait_until_up(self, connection: ServerConnection) -> None:
        spec = self._pool.spec
        if not spec.addresses:
            # A server that the run started reports that it is ready a moment before it listens.
            connection.wait_until_up(spec.start_limit_s)
            return
        silent_s = min(_SILENT_S, spec.start_limit_s)
        with contextlib.suppress(ServerLost):
            connection.wait_until_up(silent_s)
            return
        if self._ended:
            raise InterruptedError("the worker was ended while it started")
        fix = f"start one there with grpo-serve {_listening_at(connection.address)} and this run's arguments"
        minutes = f"{spec.start_limit_s / 60:.3g} minutes"
        screen.say(f"no server answers at {connection.address}; waiting for up to {minutes}: {fix}")
        try:
            connection.wait_until_up(spec.start_limit_s - silent_s)
        except ServerLost as error:
            raise ConfigError(
                f"inference_model.servers: no server answered at {connection.address} within {minutes}; "
                f"{fix}, or write inference_model.servers=auto"
            ) from error

    def _start_server(self) -> ServerProcess:
        spec = self._pool.spec
        environment = worker_env(spec.threads)
        if spec.gpus:
            size = spec.engine_size
            environment |= visible_gpus(spec.gpus[self._index * size : (self._index + 1) * size])
        log = screen.log_file()
        launch = spec.kind.launch(
            spec.cfg,
            spec.source,
            spec.device,
            max_num_seqs=spec.max_num_seqs,
            gpu_memory_utilization=spec.gpu_memory_utilization,
        )
        with self._ending:
            if self._ended:
                raise InterruptedError("the worker was ended while it started")
            self._process = ServerProcess(
                spec.kind,
                launch,
                environment=environment,
                log=None if log is None else log.with_name(f"server-{self._index}.log"),
            )
        return self._process


class ServerPool:
    """A :class:`~torchrl_grpo.rollout.workers.types.Pool` of servers.

    Args:
        spec: what the servers are started with.
        count: number of servers.

    Attributes:
        carrier: what brings weights to the servers.
    """

    def __init__(self, spec: ServerSpec, count: int) -> None:
        self.spec = spec
        self._members: list[_Member | None] = [None] * count
        self._identities = [""] * count
        self._claiming = threading.Lock()
        self.carrier = self._make_carrier()
        # Whether the carrier is known to work, and why it does not.
        self._tried = spec.weight_transfer not in ("cuda_ipc", "nccl")
        self._refusal: Exception | None = None
        # NCCL is for servers on other machines, which do not see the memory of this one.
        is_automatic = spec.cfg.inference_model.weight_transfer == "auto"
        self._falls_back = is_automatic and spec.weight_transfer == "cuda_ipc"
        # Description of the run's model, for servers that somebody else has started.
        self.model = (
            describe(spec.source, trust_remote_code=spec.cfg.model.trust_remote_code)
            if spec.addresses
            else None
        )
        # Each response holds a descriptor until it is complete, and many systems allow 1,024 by default.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def _make_carrier(self) -> Carrier:
        options = self.spec.cfg.inference_model
        if self.spec.weight_transfer == "folder":
            assert options.weight_folder is not None
            return FolderCarrier(Path(options.weight_folder), len(self._members))
        if self.spec.weight_transfer == "nccl":
            timeout_s = self.spec.cfg.collector.timeout_s
            return StreamCarrier(channel=Broadcaster(self.spec.train_device, timeout_s))
        if self.spec.weight_transfer == "cuda_ipc":
            return StreamCarrier(channel=SharedHalves(self.spec.train_device))
        return self._host_carrier()

    def _host_carrier(self) -> Carrier:
        # If responses must have age 0, servers generate only while the trainer waits for them.
        alternates = self.spec.cfg.collector.max_policy_age == 0
        return StreamCarrier() if alternates else CopyCarrier()

    def admit(self, member: _Member, address: str, gpus: Sequence[str]) -> None:
        """Let weights reach a member: see :meth:`Carrier.admit`."""
        try:
            self.carrier.admit(member, address, gpus)
        except ConfigError as error:
            if self._tried or not self._falls_back:
                raise
            self._refusal = error

    def claim(self, worker_index: int, identity: str) -> None:
        """Note that a worker has the server with this identity.

        Raises:
            ConfigError: another worker has it.
        """
        with self._claiming:
            others = [known for index, known in enumerate(self._identities) if index != worker_index]
            if identity in others:
                raise ConfigError(
                    f"inference_model.servers=[{','.join(self.spec.addresses)}]: two of the addresses lead "
                    "to the same server; name each server once"
                )
            self._identities[worker_index] = identity

    def start(self, worker_index: int, done: Callable[[Any], None]) -> None:
        self._members[worker_index] = _Member(self, worker_index, done)

    def call(self, worker_index: int, command: Command, done: Callable[[Any], None]) -> None:
        member = self._members[worker_index]
        assert member is not None
        member.call(command, done)

    @property
    def folder(self) -> Path:
        """Folder through which weights travel."""
        return self.carrier.folder

    @property
    def overwrites(self) -> bool:
        """Whether :meth:`put_weights` overwrites the previous weights. No server may load weights then."""
        return self.carrier.overwrites

    def put_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        """Take the weights of a publication: see :meth:`Carrier.put`.

        Before the first weights, a few numbers are sent from GPU to GPU. If they do not arrive, weights go
        through shared memory.

        Raises:
            ConfigError: they did not arrive, and ``inference_model.weight_transfer`` allows no other way.
        """
        if not self._tried:
            self._try_out()
        return self.carrier.put(weights)

    def _try_out(self) -> None:
        assert isinstance(self.carrier, StreamCarrier)
        self._tried = True
        takes = {member: member.engine.try_out for member in self._members if member and member.engine}
        error = self._refusal or trial.trial_error(self.carrier, takes, self.spec.train_device)
        if error is not None:
            way = self.spec.weight_transfer
            self.carrier.release()
            otherwise = "shared_memory" if way == "cuda_ipc" else "folder"
            trial.fall_back(error, way, otherwise, automatic=self._falls_back)
            self.carrier.close()
            self.carrier = self._host_carrier()

    def kill(self, worker_index: int) -> None:
        member = self._members[worker_index]
        if member is not None:
            member.end()

    def close(self) -> None:
        members = [member for member in self._members if member is not None]
        # Servers that wait for weights fail now, so that they can shut down.
        self.carrier.release()
        for member in members:
            member.terminate()
        for member in members:
            member.end(_PATIENCE_S)
        for member in members:
            member.join()
        self.carrier.close()


def _listening_at(address: str) -> str:
    """Return the options with which ``grpo-serve`` listens at an address."""
    parts = urlsplit(address)
    if parts.scheme == "unix":
        return f"--uds {parts.path}"
    here = parts.hostname in LOOPBACK
    return f"{'' if here else '--host 0.0.0.0 '}--port {parts.port or 80}"
