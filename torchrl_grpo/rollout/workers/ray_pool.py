"""Runs rollout workers as Ray actors, each with its own engine, in one placement group.

Weights go through Ray's object store in the memory of the hosts, or from GPU to GPU by CUDA IPC or NCCL.

The pool joins the cluster that ``ray.address`` names. Without an address, it starts a cluster on this machine
and stops it at the end of the run. The processes of that cluster always end with this process, because Ray
asks the kernel to end them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from torchrl_grpo.config import Config
from torchrl_grpo.errors import ConfigError, first_line
from torchrl_grpo.inference.servers.carriers import StreamCarrier
from torchrl_grpo.inference.servers.channels import trial
from torchrl_grpo.inference.servers.channels.cuda_ipc import SharedHalves
from torchrl_grpo.inference.servers.channels.nccl import Broadcaster
from torchrl_grpo.inference.servers.transfer_types import Opening
from torchrl_grpo.inference.servers.weight_stream import StreamReader, WeightStream
from torchrl_grpo.planning.cores import import_path, visible_gpus, worker_env
from torchrl_grpo.rollout.workers.ray_worker import RolloutActor, WorkerSpec, pack
from torchrl_grpo.rollout.workers.types import Command, LoadWeightsCommand
from torchrl_grpo.runtime import own_variables
from torchrl_grpo.runtime.files.shared_files import Folder, remove_abandoned
from torchrl_grpo.runtime.files.socket_folder import LONGEST, socket_parent
from torchrl_grpo.runtime.interrupts import keep_termination_handler
from torchrl_grpo.runtime.module_search import RAY_WORKER_VARIABLE

_PLACEMENT_LIMIT_S = 60.0
# Longest time that a worker takes for an item of a trial, in seconds: a group of processes has a minute.
_TRIAL_S = 120.0
# Ray frees unused objects once a second by default. With short steps, several copies of the weights
# accumulate in that time, so a cluster started here frees them more often.
_FREE_PERIOD_VAR = "RAY_free_objects_period_milliseconds"
# Ray also starts idle workers for the first tasks, up to one per core. Actors have an environment of their
# own and never use them.
_PRESTART_VAR = "RAY_prestart_worker_first_driver"
# Ray lowers the priority of workers by 15. On the cores of a busy trainer they would run only while it waits.
_NICENESS_VAR = "RAY_worker_niceness"
_FOLDER_PREFIX = "grpo-ray-"
# Longest rest of a socket's path in bytes, behind Ray's folder.
_SOCKET_ROOM = len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.12")


class RayPool:
    """Workers on a Ray cluster.

    Args:
        cfg: configuration of the run; the pool reads its ``ray`` section.
        spec: specification of every worker.
        count: number of workers.
        actor: class of the workers.
        num_extra_actors: number of additional processes, each with the same resources as a worker.

    Raises:
        ConfigError: the cluster cannot be reached, or it cannot hold so many workers.
    """

    overwrites = False

    def __init__(
        self,
        cfg: Config,
        spec: WorkerSpec,
        *,
        count: int,
        actor: type[RolloutActor] = RolloutActor,
        num_extra_actors: int = 0,
    ) -> None:
        num_bundles = count + num_extra_actors
        self._spec = spec
        self._actor = actor
        self._carrier = _make_carrier(spec)
        # Whether the carrier is known to work, or not to be there; and why it does not.
        self._tried = self._carrier is None
        self._refusal: Exception | None = None
        self._automatic = cfg.inference_model.weight_transfer == "auto"
        self._trial_s = min(_TRIAL_S, cfg.collector.timeout_s)
        # Workers come and go in other threads.
        self._changing = threading.Lock()
        self._is_local = cfg.ray.address is None
        # False if an earlier part of this process connected to Ray. The pool then keeps the connection open.
        self._owns_ray = not ray.is_initialized()
        self._folder = _short_folder() if self._owns_ray and cfg.ray.address is None else None
        if self._owns_ray:
            _connect(cfg, num_bundles, spec.gpus, self._folder)
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if spec.on_gpu else {})}
        self._actors: list[Any] = [None] * count
        self._group: Any = None
        cluster = ray.cluster_resources()
        try:
            if any(cluster.get(name, 0.0) < amount * num_bundles for name, amount in bundle.items()):
                raise GetTimeoutError("the cluster has too few resources in total")
            self._group = placement_group([bundle] * num_bundles, strategy=cfg.ray.placement.upper())
            # Wait a while, because another job may free its resources soon.
            ray.get(self._group.ready(), timeout=_PLACEMENT_LIMIT_S)
        except GetTimeoutError as error:
            self.close()
            actors = f" and {num_extra_actors} of the reference model" if num_extra_actors else ""
            fewer = "inference_model.num_devices" + (" or ref_model.num_devices" if num_extra_actors else "")
            raise ConfigError(
                f"inference_model.num_devices={count}: {count} workers{actors} with {bundle} each do not fit "
                f"into the Ray cluster, whose total is {_total(cluster, 'CPU')} and "
                f"{_total(cluster, 'GPU')}; lower {fewer}, or add nodes"
            ) from error

    def start(self, worker_index: int, done: Callable[[Any], None]) -> None:
        spec = self._spec
        actor = (
            ray.remote(self._actor)
            .options(
                num_cpus=1,
                num_gpus=1 if spec.on_gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, worker_index),
                runtime_env={"env_vars": worker_env(spec.threads)},
            )
            .remote()
        )
        with self._changing:
            self._actors[worker_index] = actor
        call_when_done(
            actor.setup.remote(spec), lambda result: done(self._admit(worker_index, actor, result))
        )

    def _admit(self, worker_index: int, actor: Any, result: Any) -> BaseException | None:
        """Let weights reach a worker that has started; return what went wrong."""
        if self._carrier is None or isinstance(result, BaseException):
            return result if isinstance(result, BaseException) else None
        address, gpu = result
        host = "127.0.0.1" if self._is_local else address
        try:
            with self._changing:
                if self._actors[worker_index] is actor:
                    self._carrier.admit(actor, f"http://{host}", [gpu])
        except Exception as error:  # noqa: BLE001  Ray would swallow it, and nobody would hear of the worker
            if self._tried or not self._automatic:
                return error
            self._refusal = error
        return None

    def extra_actor_placement(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Return the placement of an additional process, which ends with the pool."""
        return PlacementGroupSchedulingStrategy(self._group, len(self._actors) + index)

    def call(self, worker_index: int, command: Command, done: Callable[[Any], None]) -> None:
        actor = self._actors[worker_index]
        if isinstance(command, LoadWeightsCommand) and isinstance(command.content, WeightStream):
            reader = command.content.reader_for(actor)
            load = (actor, reader, replace(command, content=None), done)
            threading.Thread(target=self._send_weights, args=load, name="weights", daemon=True).start()
        elif isinstance(command, LoadWeightsCommand):
            call_when_done(actor.load.remote(command.content, replace(command, content=None)), done)
        else:
            call_when_done(actor.run.remote(command), done)

    def _send_weights(
        self, actor: Any, reader: StreamReader, command: LoadWeightsCommand, done: Callable[[Any], None]
    ) -> None:
        """Have a worker load the weights that the trainer's thread sends."""
        result: Any
        try:
            ray.get(actor.prepare.remote(command.probe))
            with contextlib.closing(reader.buckets()) as items:
                # The worker is not touched before the trainer sends.
                first = next(items)
                ray.get(actor.start_loading.remote(command.probe))
                for item in itertools.chain([first], items):
                    ray.get(actor.take.remote(item))
                    if isinstance(item, Opening) and item.brings_all:
                        break
                # Even if another worker has left since then.
                reader.mark_received()
            result = ray.get(actor.finish_loading.remote(command))
        except Exception as error:  # noqa: BLE001  it is reported
            result = _own_error(error)
        finally:
            reader.mark_done()
        done(result)

    def put_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Take the weights of a publication, in the form that :meth:`call` sends.

        Ray's object store keeps one copy per node for any number of workers. Before the first weights, a few
        numbers are sent, and if they do not arrive, weights go through the object store.

        Raises:
            ConfigError: they did not arrive, and ``inference_model.weight_transfer`` allows no other way.
        """
        if not self._tried:
            self._try_out()
        return ray.put(pack(weights)) if self._carrier is None else self._carrier.put(weights)

    def _try_out(self) -> None:
        assert self._carrier is not None
        spec, self._tried = self._spec, True

        def try_out(actor: Any, item: Any) -> None:
            try:
                ray.get(actor.try_out.remote(item), timeout=self._trial_s)
            except RayTaskError as error:
                raise _own_error(error) from error

        takes = {actor: partial(try_out, actor) for actor in self._actors}
        error = self._refusal or trial.trial_error(self._carrier, takes, spec.train_device)
        if error is not None:
            self._carrier.release()
            trial.fall_back(error, spec.weight_transfer, "ray_objects", automatic=self._automatic)
            self._carrier.close()
            self._carrier = None

    def kill(self, worker_index: int) -> None:
        with self._changing:
            actor, self._actors[worker_index] = self._actors[worker_index], None
        if actor is not None:
            ray.kill(actor)
            if self._carrier is not None:
                self._carrier.dismiss(actor)

    def close(self) -> None:
        if self._carrier is not None:
            self._carrier.release()
        for worker_index in range(len(self._actors)):
            self.kill(worker_index)
        if self._carrier is not None:
            self._carrier.close()
        if self._group is not None:
            remove_placement_group(self._group)
        if self._owns_ray:
            _disconnect()
        if self._folder is not None:
            self._folder.close()


def _make_carrier(spec: WorkerSpec) -> StreamCarrier | None:
    """Return what sends weights from the trainer's device; None if they go through Ray's object store."""
    options = {"receiver": "worker", "otherwise": "ray_objects"}
    if spec.weight_transfer == "cuda_ipc":
        return StreamCarrier(channel=SharedHalves(spec.train_device, **options))
    if spec.weight_transfer == "nccl":
        timeout_s = spec.cfg.collector.timeout_s
        return StreamCarrier(channel=Broadcaster(spec.train_device, timeout_s, **options))
    return None


def _total(resources: dict[str, float], name: str) -> str:
    return f"{resources.get(name, 0.0):g} {name}"


def call_when_done(ref: Any, done: Callable[[Any], None]) -> None:
    """Call ``done`` from any thread with the result or the error of an actor's call."""

    def finished(future: Any) -> None:
        error = future.exception()
        done(future.result() if error is None else _own_error(error))

    ref.future().add_done_callback(finished)


def _own_error(error: BaseException) -> BaseException:
    """Return the worker's own exception, if Ray has wrapped it."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error


def _short_folder() -> Folder | None:
    """Return a folder for Ray's own cluster, if paths of its sockets would be too long in the usual one."""
    # As Ray chooses it.
    usual = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR", "/tmp")
    if len(os.fsencode(usual)) + len("/ray") + _SOCKET_ROOM <= LONGEST:
        return None
    parent = socket_parent(len(f"/{_FOLDER_PREFIX}12345678") + _SOCKET_ROOM, usual)
    # Those of runs that were killed.
    remove_abandoned(parent, _FOLDER_PREFIX)
    return Folder(parent, _FOLDER_PREFIX)


def _connect(cfg: Config, count: int, gpus: Sequence[int], folder: Folder | None = None) -> None:
    address = cfg.ray.address
    if address is None:
        # Every worker occupies one CPU slot, so offer enough slots even if there are fewer cores.
        _start_local(max(count, os.cpu_count() or 1), gpus, folder)
        return
    try:
        _check_reachable(address)
        with keep_termination_handler():
            ray.init(address=address, **_options())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ray.address={address}: no Ray cluster answers there ({first_line(error)}); start one "
            "with `ray start --head`, or write ray.address=null to start one for this run"
        ) from error


def _options() -> dict[str, Any]:
    # Let workers import this project from the trainer's folder, also on a cluster with a shared file system.
    variables = {"PYTHONPATH": os.pathsep.join(import_path()), RAY_WORKER_VARIABLE: os.getcwd()}
    return {"log_to_driver": False, "configure_logging": False, "runtime_env": {"env_vars": variables}}


def _start_local(num_cpus: int, gpus: Sequence[int], folder: Folder | None) -> None:
    with own_variables.hidden(), own_variables.temporary(cluster_env(gpus)), keep_termination_handler():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=len(gpus),
            include_dashboard=False,
            _temp_dir=None if folder is None else str(folder.path),
            **_options(),
        )


@contextlib.contextmanager
def local_cluster(num_cpus: int, gpus: Sequence[int]) -> Iterator[None]:
    """Start a cluster on this machine with so many CPUs and these GPUs, and stop it at the end."""
    folder = _short_folder()
    try:
        _start_local(num_cpus, gpus, folder)
        yield
    finally:
        _disconnect()
        if folder is not None:
            folder.close()


def _disconnect() -> None:
    # Ray resets SIGTERM to the system's default without Python's notice, so it would end the run at once.
    with keep_termination_handler():
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Fail fast: ``ray.init`` retries an unreachable HOST:PORT for minutes.

    Raises:
        OSError: the address cannot be reached.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def cluster_env(gpus: Sequence[int]) -> dict[str, str]:
    """Return the environment for a Ray cluster that is started here.

    A variable of Ray that is already set keeps its value. Ray assigns the GPUs that its node process sees, so
    the environment lists only ``gpus``. Actors, and what they start, have the priority of this process.
    """
    defaults = {_FREE_PERIOD_VAR: "10", _PRESTART_VAR: "0", _NICENESS_VAR: "0"}
    variables = {name: os.environ.get(name, default) for name, default in defaults.items()}
    return variables | (visible_gpus(gpus) if gpus else {})
