"""``grpo-serve``: a server of vLLM or SGLang, for runs that name it in ``inference_model.servers``.

It takes the arguments of the training command, so that model, dtype and lengths are the same.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_grpo.cli import listening
from torchrl_grpo.cli.arguments import Parser
from torchrl_grpo.cli.checked_job import compose_job
from torchrl_grpo.cli.endings import USER_ERROR_CODE
from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import check_installed
from torchrl_grpo.config.checks.engine import LOOPBACK
from torchrl_grpo.config.engines import engine_kind, engines_with
from torchrl_grpo.errors import ConfigError, UserError
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.files.closed_output import quiet_end
from torchrl_grpo.runtime.files.socket_folder import socket_parent

if TYPE_CHECKING:
    from torchrl_grpo.inference.servers.kinds import ServerKind

# Longest name of a socket in bytes that vLLM and SGLang put into a folder.
_SOCKET_ROOM = len(f"/{uuid.UUID(int=0)}")


@quiet_end()
def main(argv: Sequence[str] | None = None) -> None:
    """Start a server in place of this process.

    Args:
        argv: arguments; those of this process by default.

    Raises:
        SystemExit: with code 2 for a user error.
    """
    try:
        args = _parser().parse_intermixed_args(argv)
        cfg = compose_job(args.overrides, args.config_name, args.config_dir)
        check_installed(cfg)
        kind = _kind(cfg)
        words, variables = serve_command(cfg, kind, _where(args, kind), makes_key=not args.print)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(USER_ERROR_CODE) from None
    if args.print:
        shown = {**variables, kind.engine.api_key_variable: "YOUR_KEY"}
        settings = " ".join(f"{name}={value}" for name, value in shown.items())
        sys.stdout.write(f"{settings} {shlex.join(words)}\n")
        return
    # The server is no training rank, and another job may have left its variables here.
    inherited = {name: value for name, value in os.environ.items() if name not in rank_env.VARIABLES}
    os.execve(words[0], words, {**inherited, **variables})


def _served() -> list[str]:
    return engines_with(lambda kind: kind.has_servers)


def _parser() -> argparse.ArgumentParser:
    first, *others = map(engine_kind, _served())
    variables = [f"{kind.api_key_variable} for {kind.program}" for kind in others]
    parser = Parser(
        prog="grpo-serve",
        description=f"Serve a model to runs with inference_model.backend={' or '.join(_served())}. All "
        "other arguments are the same as for the training command.",
        epilog=f"{', or '.join([first.api_key_variable, *variables])}, holds the key that the run has to "
        "bring. Set it in both places.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--config-name", "-cn", default="grpo_gsm8k", help="primary configuration")
    parser.add_argument("--config-dir", "-cd", type=Path, help="folder with configurations of your own")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--uds", type=Path, help="socket file to listen on, in place of host and port")
    parser.add_argument("--print", action="store_true", help="print the server's command, and do not run it")
    return parser


def _kind(cfg: Config) -> ServerKind:
    """Return the kind of server that a configuration asks for; vLLM's if its engine has no servers."""
    from torchrl_grpo.inference.servers.kinds import server_kind

    engine = cfg.inference_model.engine
    return server_kind(engine if engine.has_servers else engine_kind(_served()[0]))


def _where(args: argparse.Namespace, kind: ServerKind) -> dict[str, str | int]:
    if args.uds is not None:
        if not args.print:
            listening.check_socket(args.uds.resolve())
        return {"uds": str(args.uds.resolve())}
    if args.host not in LOOPBACK and not os.environ.get(kind.engine.api_key_variable):
        raise ConfigError(
            f"--host={args.host}: other machines can reach this server, and "
            f"{kind.engine.api_key_variable} is not set; set it to a secret here and for the run"
        )
    if not args.print:
        listening.check_port(args.host, args.port)
    return {"host": args.host, "port": args.port}


def serve_command(
    cfg: Config, kind: ServerKind, where: dict[str, str | int], makes_key: bool = True
) -> tuple[list[str], dict[str, str]]:
    """Return the command of the server, and the variables that it needs.

    Args:
        cfg: configuration of the run.
        kind: kind of the server.
        where: where it listens: ``host`` and ``port``, or ``uds``.
        makes_key: whether to make a key, and to print it, if the environment has none.

    Raises:
        UserError: the model cannot be found.
    """
    import torch

    from torchrl_grpo.models import loading
    from torchrl_grpo.planning.plan import OWN_GPU
    from torchrl_grpo.planning.workload import max_num_seqs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    share = cfg.inference_model.gpu_memory_utilization
    launch = kind.launch(
        cfg,
        loading.resolve(cfg.model),
        device,
        max_num_seqs=max_num_seqs(cfg, on_gpu=device.type == "cuda"),
        gpu_memory_utilization=OWN_GPU if share is None else share,
    )
    key = os.environ.get(kind.engine.api_key_variable, "")
    if not key and makes_key:
        key = secrets.token_urlsafe(32)
        sys.stdout.write(f"{kind.engine.api_key_variable}={key}  # set this for the run\n")
        sys.stdout.flush()
    variables = {**launch.variables, kind.engine.api_key_variable: key}
    # The first of them says where the server makes its sockets.
    name = launch.folder_variables[0]
    usual = os.environ.get(name) or tempfile.gettempdir()
    if str(short := socket_parent(_SOCKET_ROOM, usual)) != usual:
        variables[name] = str(short)
    return launch.command(where), variables
