"""``python -m torchrl_grpo.inference.servers.vllm.judge_program SOCKET``: the server of a judge.

The parent says on the socket what to start, and hears on it when the server is up
(:mod:`torchrl_grpo.rewards.judge.server`).
"""

from __future__ import annotations

import json
import os
import socket
import sys

from torchrl_grpo.config.values import KEY_VARIABLE
from torchrl_grpo.inference.servers.lifetime import READY_VARIABLE
from torchrl_grpo.inference.servers.vllm.command import vllm_launch
from torchrl_grpo.inference.vllm_compat import run_server
from torchrl_grpo.planning.cores import allowed_cores


def main(number: int) -> None:
    """Run the server until it is ended.

    Args:
        number: file descriptor of the socket, which stays open for the sign that the server is up.
    """
    own = socket.socket(fileno=number)
    with own.makefile("r", encoding="utf-8") as lines:
        settings = json.loads(lines.readline())
    # Others in this group are ended with it, and the parent deletes the memory that they leave.
    own.sendall(json.dumps({"group": os.getpgid(0)}).encode() + b"\n")
    on_cpu = settings["on_cpu"]
    arguments = {"enforce_eager": on_cpu, "served_model_name": settings["model"], **settings["engine_args"]}
    launch = vllm_launch(settings["model"], arguments, on_cpu=on_cpu)
    words = launch.command({"uds": settings["socket"]})
    sys.argv = words[words.index("-m") + 1 :]
    os.environ.update(launch.variables)
    os.environ.update(dict.fromkeys(launch.folder_variables, os.path.dirname(settings["socket"])))
    os.environ.update({KEY_VARIABLE: settings["key"], READY_VARIABLE: str(own.fileno())})
    if on_cpu:
        os.environ["OMP_NUM_THREADS"] = str(allowed_cores())
    run_server()


if __name__ == "__main__":
    main(int(sys.argv[1]))
