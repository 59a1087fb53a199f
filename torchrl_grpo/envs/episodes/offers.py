"""What the model may call in a run: tools that this process knows, and those that servers offer."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import ENVIRONMENTS
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.remote import OPENENV, command, is_remote, is_url, place
from torchrl_grpo.envs.episodes.processes import CallError, EpisodeHost, UserCodeSpec
from torchrl_grpo.envs.episodes.tools.offered import offered_tool
from torchrl_grpo.envs.episodes.tools.tool import Tool
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.sandbox.pool import START_LIMIT_S


@dataclass(frozen=True)
class Offer:
    """What the model may call.

    Attributes:
        tools: the tools, those of servers last and by name, because a server may list them in any order.
        form: how actions of an OpenEnv environment are made; None for other environments.
    """

    tools: Sequence[Tool]
    form: Mapping[str, Any] | None = None


def check_available(cfg: Config) -> None:
    """Check that servers which the configuration names can be used on this machine. None is started.

    Raises:
        ConfigError: a package or a program is missing.
    """
    for name in filter(is_remote, (*cfg.env.tools, cfg.env.environment or "")):
        key, package, extra = ("env.tools", "mcp", "mcp")
        if name.startswith(OPENENV):
            key, package, extra = "env.environment", "websockets", "openenv"
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key} has {name!r}, which needs the package {package}; install it with "
                f"pip install 'torchrl-grpo[{extra}]'"
            )
        if not is_url(place(name)) and shutil.which(program := command(place(name))[0]) is None:
            raise ConfigError(
                f"{key} has {name!r}, and there is no program {program}; install it, or correct its path"
            )


def open_host(cfg: Config, own_tools: Sequence[Tool]) -> EpisodeHost | None:
    """Start the process that forks those of the episodes; return None if nothing needs one.

    Args:
        cfg: configuration of the run.
        own_tools: tools of which it loads the user's functions.

    Raises:
        ConfigError: the user's code cannot be loaded there.
    """
    environment = cfg.env.environment
    spec = UserCodeSpec(
        environment=None if environment in ENVIRONMENTS else environment,
        environment_args=dict(cfg.env.environment_args),
        tools=[*(tool.spec for tool in own_tools if tool.is_users), *filter(is_remote, cfg.env.tools)],
        limit_s=cfg.env.tool_timeout_s,
        max_characters=cfg.env.max_tool_characters,
        has_tools=bool(cfg.env.tools),
    )
    return EpisodeHost(spec) if spec.environment is not None or spec.tools else None


def offer_of(cfg: Config, own_tools: Sequence[Tool], host: EpisodeHost | None, count: int = 1) -> Offer:
    """Return what the model may call.

    Args:
        cfg: configuration of the run.
        own_tools: tools that this process knows.
        host: process that :func:`open_host` has started.
        count: number of episodes at a time, for which an environment's server must have room.

    Raises:
        ConfigError: a server does not answer, offers something that cannot be used, or lacks a tool of
            ``env.allowed_tools``.
    """
    has_servers = any(map(is_remote, (*cfg.env.tools, cfg.env.environment or "")))
    if host is None or not has_servers:
        return Offer(own_tools)
    process = host.start_episode()
    try:
        payload = {"do": "describe", "limit_s": 0.9 * START_LIMIT_S, "count": count}
        described = process.call(payload, START_LIMIT_S)
    except CallError as error:
        servers = ", ".join(filter(is_remote, (*cfg.env.tools, cfg.env.environment or "")))
        raise ConfigError(
            f"env.environment, env.tools: asking {servers} what it offers failed: {error}; start or correct "
            "the server"
        ) from error
    finally:
        process.close()
    environment = described["environment"] or {"form": None, "tools": []}
    offers = [
        (spec, offer, False) for spec, offered in described["tools"].items() for offer in _some(spec, offered)
    ]
    if environment["form"] is not None and environment["form"]["kind"] == "mcp":
        _some(str(cfg.env.environment), environment["tools"])
    offers += [(str(cfg.env.environment), offer, True) for offer in environment["tools"]]
    tools = {tool.name: tool for tool in own_tools}
    for spec, offer, of_environment in _allowed(cfg.env.allowed_tools, offers):
        tool = offered_tool(offer, spec, of_environment=of_environment)
        if tool.name in tools:
            raise ConfigError(
                f"env.tools, env.environment: {tools[tool.name].spec} and {spec} both have a tool "
                f"{tool.name!r}; leave out one of them"
            )
        tools[tool.name] = tool
    in_order = sorted(tools.values(), key=lambda tool: tool.name if tool.is_remote else "")
    return Offer(in_order, environment["form"])


def _some(spec: str, offered: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not offered:
        raise ConfigError(f"{spec!r} offers no tool; correct the server, or leave it out")
    return offered


_Offers = list[tuple[str, Mapping[str, Any], bool]]


def _allowed(names: list[str], offers: _Offers) -> _Offers:
    if not names:
        return offers
    offered = [str(offer.get("name"))[:80] for _, offer, _ in offers]
    unknown = [name for name in names if name not in offered]
    if unknown:
        wrong = f"no server offers {unknown[0]!r}; they offer {', '.join(offered)[:500]}"
        raise bad_value("env.allowed_tools", names, wrong, "names that are offered, or env.allowed_tools=[]")
    return [entry for entry in offers if entry[1].get("name") in names]
