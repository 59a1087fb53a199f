"""``python -m torchrl_grpo.slurm.gate``: wait until the servers of a run answer, or until Ray has its nodes.

The step of the trainer begins after this command. A server has answered when it has generated a token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from torchrl_grpo.cli.arguments import Parser
from torchrl_grpo.cli.endings import USER_ERROR_CODE
from torchrl_grpo.config.values import KEY_VARIABLE
from torchrl_grpo.errors import ConfigError, UserError
from torchrl_grpo.planning.plan import counted
from torchrl_grpo.runtime.files.closed_output import quiet_end

# Seconds between two attempts to reach a port that nobody listens at yet.
_RETRY_S = 0.5
# Any token ids will do. Every vocabulary has these.
_PROMPT = (1, 2, 3)


def wait_for_servers(addresses: Sequence[str], key: str, timeout_s: float) -> None:
    """Block until each server has generated a token.

    Args:
        addresses: addresses of the servers.
        key: key that they ask for.
        timeout_s: seconds for all of them together.

    Raises:
        ConfigError: a server refuses the key, does not answer in time, or answers with something else.
    """
    from torchrl_grpo.inference.servers.http import ServerConnection, ServerLost

    end = time.monotonic() + timeout_s
    sampling = {"detokenize": False, "max_tokens": 1, "temperature": 1.0, "seed": 0}
    body = {"token_ids": list(_PROMPT), "sampling_params": sampling}
    for address in addresses:
        try:
            with closing(ServerConnection(address, key, timeout_s)) as connection:
                connection.wait_until_up(max(0.0, end - time.monotonic()))
                left = max(0.0, end - time.monotonic())
                answer = connection.post("/inference/v1/generate", body, timeout_s=left)
        except ServerLost as error:
            raise ConfigError(
                f"the server at {address} is not ready after {timeout_s:g} s ({error}); look into its log, "
                "or write a larger --start-seconds"
            ) from error
        tokens = answer["choices"][0]["token_ids"]
        if len(tokens) != 1:
            raise ConfigError(f"the server at {address} answered {tokens}, not one token; look into its log")
        sys.stdout.write(f"{address} has generated a token\n")
        sys.stdout.flush()


def wait_for_ray(address: str, nodes: int, timeout_s: float) -> None:
    """Block until Ray listens at an address and has a number of nodes.

    Args:
        address: ``HOST:PORT`` of the head.
        nodes: number of nodes, the head's included; 0 waits for the port alone.
        timeout_s: seconds for all of it.

    Raises:
        ConfigError: it does not in time.
    """
    end = time.monotonic() + timeout_s
    late = f"Ray at {address} did not reach {counted(nodes or 1, 'node')} within {timeout_s:g} s"
    fix = "see the logs of its steps"
    try:
        asyncio.run(asyncio.wait_for(_until_port_is_open(address), timeout_s))
    except TimeoutError as error:
        raise ConfigError(f"{late} (nothing is listening); {fix}") from error
    if not nodes:
        return
    import ray
    from ray.exceptions import GetTimeoutError
    from ray.util.placement_group import placement_group, remove_placement_group

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        # Ray itself waits for nodes: each bundle has to be on another one.
        group = placement_group([{"CPU": 0.001}] * nodes, strategy="STRICT_SPREAD")
        ray.get(group.ready(), timeout=max(0.0, end - time.monotonic()))
        remove_placement_group(group)
    except GetTimeoutError as error:
        raise ConfigError(f"{late} (it has {len(ray.nodes())}); {fix}") from error
    finally:
        ray.shutdown()
    sys.stdout.write(f"Ray at {address} has {nodes} nodes\n")
    sys.stdout.flush()


async def _until_port_is_open(address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            # Nobody tells this process when a program of another machine begins to listen.
            await asyncio.sleep(_RETRY_S)
        else:
            writer.close()
            return


@quiet_end()
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        if arguments.ray is not None:
            wait_for_ray(arguments.ray, arguments.nodes, arguments.timeout)
        wait_for_servers(arguments.servers, os.environ.get(KEY_VARIABLE, ""), arguments.timeout)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_ERROR_CODE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m torchrl_grpo.slurm.gate", __doc__)
    parser.add_argument("servers", nargs="*", metavar="ADDRESS", help="address of a server")
    parser.add_argument("--ray", metavar="HOST:PORT", help="address of Ray's head")
    parser.add_argument("--nodes", type=int, default=0, help="nodes that Ray must have (0: any)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds to wait for all of them")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
