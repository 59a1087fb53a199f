"""Which node of a job does what: a plan for several machines, made of the plan for one."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo.config import Config
from torchrl_grpo.config.engines import engine_kind, engines_with
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning import preflight
from torchrl_grpo.planning.plan import Plan, counted

# Ways of weights that stay within a machine.
_ON_ONE_MACHINE = ("shared_memory", "cuda_ipc")


def check_transfer(cfg: Config) -> None:
    """Check that weights reach servers on other nodes.

    Raises:
        ConfigError: they would stay on the trainer's node.
    """
    way = cfg.inference_model.weight_transfer
    if way in _ON_ONE_MACHINE:
        raise bad_value(
            "inference_model.weight_transfer",
            way,
            "it works on one machine, and the servers of a job are on other nodes than the trainer",
            "inference_model.weight_transfer=folder or inference_model.weight_transfer=nccl",
        )


@dataclass(frozen=True)
class Layout:
    """What runs on the nodes of a job. The trainer is on the first node.

    Attributes:
        plan: placement of the roles on the first node.
        nodes: number of nodes.
        gpus: number of GPUs of each node.
        engines: number of servers, or of workers on Ray, of all nodes together; 0 on one node.
        servers: whether the engines are servers.
    """

    plan: Plan
    nodes: int
    gpus: int
    engines: int = 0
    servers: bool = False

    @property
    def per_node(self) -> int:
        """The number of servers of each node but the first."""
        assert self.servers
        return self.engines // (self.nodes - 1)

    @property
    def left_on_first(self) -> list[int]:
        """Numbers of the first node's GPUs that the trainer's process does not use."""
        used = _used_on_first(self.plan)
        return [gpu for gpu in range(self.gpus) if f"cuda:{gpu}" not in used]


def needs_servers(cfg: Config, nodes: int) -> bool:
    """Whether the job starts servers on nodes of their own."""
    return nodes > 1 and cfg.inference_model.engine.has_job_servers


def check_script(script: str, cfg: Config, nodes: int) -> None:
    """Check that a script can use several nodes, and that the job's script can start the run.

    Args:
        script: name of the command.
        cfg: configuration of the run, without what the job adds.
        nodes: number of nodes.

    Raises:
        ConfigError: it cannot.
    """
    if cfg.inference_model.servers != "auto":
        wrong = "the job starts the servers of its nodes"
        raise bad_value(
            "inference_model.servers", cfg.inference_model.servers, wrong, "inference_model.servers=auto"
        )
    if cfg.ray.address is not None:
        raise bad_value("ray.address", cfg.ray.address, "the job starts Ray on its nodes", "ray.address=null")
    engine = cfg.inference_model.engine
    if nodes > 1 and engine.has_servers and not engine.has_job_servers:
        other = engines_with(lambda kind: kind.has_job_servers)[0]
        wrong = f"a job of --nodes={nodes} starts {engine_kind(other).program} servers only"
        fix = f"inference_model.backend={other}, or --nodes=1"
        raise bad_value("inference_model.backend", cfg.inference_model.backend, wrong, fix)
    if nodes > 1 and cfg.train.method == "sft":
        raise ConfigError(
            f"--nodes={nodes}: {script} has no engines, and its training ranks run on one machine; "
            "write --nodes=1"
        )


def count_engines(cfg: Config, asynchronous: bool, nodes: int, gpus: int) -> int:
    """Return the number of servers or workers of a job with several nodes.

    Args:
        cfg: configuration of the run. If workers run on Ray, ``ray.address`` is set, to any address.
        asynchronous: whether the script is grpo-async.py.
        nodes: number of nodes.
        gpus: number of GPUs of each node.

    Raises:
        ConfigError: they do not fit.
    """
    num_devices = cfg.inference_model.num_devices
    key = "inference_model.num_devices"
    if needs_servers(cfg, nodes):
        others = nodes - 1
        room = others * max(1, gpus)
        count = num_devices if isinstance(num_devices, int) else _at_most(cfg.env.num_envs, room, others)
        if count % others:
            fewer = count - count % others or others
            wrong = f"{others} nodes get the same number of servers each"
            raise bad_value(key, count, wrong, f"{key}={fewer}")
        if gpus > 0 and room < count:
            have = "has" if others == 1 else "have"
            wrong = f"{counted(others, 'node')} besides the trainer's {have} {counted(room, 'GPU')} together"
            raise bad_value(key, count, wrong, f"{key}={room}, or more --nodes")
        return count
    plan = place(cfg, asynchronous, gpus)
    actors = plan.reference_actors if plan.reference.placement == "cluster" else 0
    room = nodes * gpus - len(_used_on_first(plan)) - actors if gpus else nodes
    count = num_devices if isinstance(num_devices, int) else _at_most(cfg.env.num_envs, room, 1)
    if gpus and count > room:
        wrong = f"the other roles leave {counted(room, 'GPU')} on {nodes} nodes"
        raise bad_value(key, count, wrong, f"{key}={room}, or more --nodes" if room > 0 else "more --nodes")
    return count


def _at_most(groups: int, room: int, divisor: int) -> int:
    """Return the largest number of engines that there is work and room for; at least ``divisor``."""
    most = min(groups, room)
    return max(divisor, most - most % divisor)


def place(cfg: Config, asynchronous: bool, gpus: int) -> Plan:
    """Place the roles on one node.

    Raises:
        ConfigError: they do not fit; the message begins with the option that says how many GPUs there are.
    """
    try:
        return preflight.place(cfg, asynchronous, gpus)
    except ConfigError as error:
        raise ConfigError(f"--gpus-per-node={gpus}: {error}") from error


def _used_on_first(plan: Plan) -> set[str]:
    roles = (plan.train, plan.reference) if plan.inference.placement in ("cluster", "servers") else ()
    return {name for role in roles for name in role.devices if name.startswith("cuda:")}
