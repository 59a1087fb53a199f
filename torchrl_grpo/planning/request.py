"""The request to the planner: devices for each role, and other settings that decide where roles can run."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from torchrl_grpo.config.allocation import meaning
from torchrl_grpo.config.checks.schedule import may_sleep
from torchrl_grpo.config.derived import frozen_model, needs_frozen_model
from torchrl_grpo.config.engines import DEFAULT_ENGINE, EngineKind, engine_kind
from torchrl_grpo.config.judges import reward_gpu
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.mixture import mixture_parts
from torchrl_grpo.config.schema import TeacherName

if TYPE_CHECKING:
    from torchrl_grpo.config import Config


@dataclass(frozen=True)
class Role:
    """The devices requested for one role.

    Attributes:
        key: section of the configuration.
        num_devices: number of devices; None lets the planner choose.
        devices: numbers of the GPUs, or None.
    """

    key: str
    num_devices: int | None = None
    devices: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """The number of devices. Engines without a number may get all devices of the trainer instead."""
        if self.num_devices is not None:
            return self.num_devices
        return 1 if self.devices is None else len(self.devices)


@dataclass(frozen=True)
class Request:
    """The request to the planner.

    Attributes:
        train: devices of the trained model.
        inference: devices of the engines.
        reference: devices of the reference model, or of the teacher in its place.
        asynchronous: whether the script is grpo-async.py, whose engines generate while the trainer trains.
        cluster: whether the engines run on a Ray cluster, which has GPUs of its own.
        uses_reference: whether anything reads the log-probabilities of that model.
        lora: whether only adapters are trained, and the reference is the same model without them.
        backend: value of ``inference_model.backend``.
        engine_size: number of devices of one engine.
        one_device: overrides with which an engine has one device, for error messages.
        weight_transfer: value of ``inference_model.weight_transfer``.
        needs_copy: the setting because of which the trainer cannot send its own weights, e.g. because it does
            not wait until workers have loaded them; empty if there is none.
        servers: number of servers that ``inference_model.servers`` names; 0 if the run starts its engines.
        elsewhere: whether workers may be, or a server is, on another machine.
        sleep: whether the engine frees its memory while the trainer trains; None lets the planner choose.
        gpu_memory_utilization: share of a GPU's memory that vLLM takes; None lets the planner choose.
        ranks: number of training ranks on all machines, if a launcher has started them.
        reference_in_own_processes: whether a reference with devices of its own scores in its own processes,
            while the trainer trains. False if generation and training take turns, because separate processes
            save no time then. False if the reference follows the policy, because it is updated between two
            steps.
        reward_gpus: names of rewards with a GPU of their own, and its number.
        allocation_mode: text for messages: ``allocation_mode`` and the overrides that it stands for; empty if
            it is not set.
    """

    train: Role = Role("train_model")
    inference: Role = Role("inference_model")
    reference: Role = Role("ref_model")
    asynchronous: bool = False
    cluster: bool = False
    uses_reference: bool = False
    lora: bool = False
    backend: str = DEFAULT_ENGINE
    engine_size: int = 1
    one_device: str = ""
    weight_transfer: str = "auto"
    needs_copy: str = ""
    servers: int = 0
    elsewhere: bool = False
    sleep: bool | None = None
    gpu_memory_utilization: float | None = None
    ranks: int = 1
    reference_in_own_processes: bool = False
    reward_gpus: tuple[tuple[str, int], ...] = ()
    allocation_mode: str = ""

    @property
    def teaches(self) -> bool:
        """Whether a teacher takes the place of the reference model."""
        return self.reference.key == TeacherName.section

    @property
    def engine(self) -> EngineKind:
        """What the engine of ``backend`` can do."""
        return engine_kind(self.backend)

    @property
    def needs_processes(self) -> bool:
        """Whether the engines run as workers in processes of their own wherever they are placed.

        True for servers, for grpo-async.py, for a Ray cluster, for several engines, and for engines that own
        their process if there are several ranks: vLLM would use the ranks' process group as its own.
        """
        with_ranks = self.engine.owns_process and max(self.ranks, self.train.count) > 1
        several = self.inference.count > 1
        return self.engine.has_servers or self.asynchronous or self.cluster or several or with_ranks

    @property
    def ranks_generate(self) -> bool:
        """Whether each training rank has an engine, if the engines share the trainer's devices."""
        unsaid = self.inference.num_devices is None and self.inference.devices is None
        return unsaid and not self.needs_processes and max(self.ranks, self.train.count) > 1


def build_request(cfg: Config, asynchronous: bool, ranks: int = 1) -> Request:
    """Build the request of a configuration.

    Args:
        cfg: configuration.
        asynchronous: whether the script is grpo-async.py.
        ranks: number of training ranks on all machines, if a launcher has started them.
    """
    servers = 0 if cfg.inference_model.servers == "auto" else len(cfg.inference_model.servers)
    inference = cfg.inference_model
    size = inference.tensor_parallel_size * inference.pipeline_parallel_size
    count = servers or inference.num_devices
    if size > 1 and count == "auto" and inference.devices is None:
        count = size
    frozen = frozen_model(cfg)
    return Request(
        train=_role("train_model", cfg.train_model.num_devices, cfg.train_model.devices),
        inference=_role("inference_model", count, inference.devices),
        reference=_role(frozen.section, frozen.num_devices, frozen.devices),
        asynchronous=asynchronous,
        cluster=cfg.ray.address is not None,
        uses_reference=needs_frozen_model(cfg.policy),
        lora=cfg.train_model.lora.rank > 0 and cfg.policy.distill_coef == 0,
        backend=cfg.inference_model.backend,
        engine_size=size,
        one_device=" ".join(
            f"inference_model.{name}_parallel_size=1"
            for name, number in (
                ("tensor", inference.tensor_parallel_size),
                ("pipeline", inference.pipeline_parallel_size),
            )
            if number > 1
        ),
        weight_transfer=inference.weight_transfer,
        needs_copy=_needs_copy(cfg) if asynchronous else "",
        servers=servers,
        elsewhere=cfg.ray.address is not None or (servers > 0 and any(map(_is_elsewhere, inference.servers))),
        sleep=cfg.inference_model.sleep,
        gpu_memory_utilization=cfg.inference_model.gpu_memory_utilization,
        ranks=ranks,
        # The processes of a reference model run on Ray, and servers do not need it.
        reference_in_own_processes=asynchronous
        and not cfg.inference_model.engine.has_servers
        and cfg.collector.max_policy_age > 0
        and cfg.ref_model.refresh_frequency == 0,
        reward_gpus=reward_gpus(cfg),
        allocation_mode="" if cfg.allocation_mode is None else _allocation(cfg),
    )


def _needs_copy(cfg: Config) -> str:
    """Return the setting of grpo-async.py because of which workers load weights while the trainer trains."""
    if not may_sleep(cfg):
        return f"train.weight_update_frequency={cfg.train.weight_update_frequency}"
    drains = cfg.collector.weight_update == "drain" and not cfg.collector.partial_rollout
    return "collector.weight_update=drain" if drains else ""


def _is_elsewhere(address: str) -> bool:
    """Return whether a server is on another machine: its host has addresses, and none is of this machine."""
    parts = urlsplit(address)
    if parts.scheme == "unix":
        return False
    try:
        places = socket.getaddrinfo(parts.hostname, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        # Nothing is known of a host without an address. The connection reports it.
        return False
    return not any(_can_bind(family, place) for family, *_, place in places)


def _can_bind(family: int, place: tuple[Any, ...]) -> bool:
    """Return whether an address is of this machine, which alone can be bound."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as udp:
            udp.bind(place)
    except OSError:
        return False
    return True


def reward_gpus(cfg: Config) -> tuple[tuple[str, int], ...]:
    """Return the names of the rewards with a GPU of their own, and its number."""
    gpus = {
        name: gpu
        for run in [part.cfg for part in mixture_parts(cfg)] or [cfg]
        for name in run.reward.functions
        if (gpu := reward_gpu(run, name)) is not None
    }
    return tuple(gpus.items())


def _allocation(cfg: Config) -> str:
    """Return ``allocation_mode`` and the keys that it stands for."""
    meanings = ", ".join(f"{key}={show(value)}" for key, value in meaning(cfg).items())
    return f"allocation_mode={cfg.allocation_mode} is {meanings}"


def _role(key: str, count: int | str, devices: list[int] | None) -> Role:
    # The configuration's checks have refused any text but auto.
    return Role(key, count if isinstance(count, int) else None, None if devices is None else tuple(devices))
