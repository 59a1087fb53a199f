"""A judge's own server, which the run starts and ends."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Mapping
from typing import Any

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.judge import own_model
from torchrl_grpo.runtime.files.shared_files import Folder, remove_abandoned
from torchrl_grpo.runtime.files.socket_folder import socket_parent
from torchrl_grpo.runtime.shared_memory import segments_of, unlink
from torchrl_grpo.runtime.supervised import SupervisedProcess

_PROGRAM = "torchrl_grpo.inference.servers.vllm.judge_program"
_PREFIX = "grpo-judge-"
# Longest rest of a socket's path in bytes: the name of the server's folder, and that of a socket of vLLM.
_SOCKET_ROOM = len(f"/{_PREFIX}12345678") + len(f"/{uuid.UUID(int=0)}")
# Seconds that a large model may take to be downloaded and loaded.
_START_LIMIT_S = 1800.0


class JudgeServer:
    """A vLLM server on a socket in a folder that only this user can open.

    Args:
        where: configuration key of its device and the value, for messages.
        model: name on the hub, or a folder. The server knows it by this name.
        gpu: number of its GPU; None for the CPU.
        engine_args: further options of vLLM.

    Attributes:
        address: ``unix:PATH``.
        key: key that it asks for.
        identity: see :func:`~torchrl_grpo.rewards.judge.own_model.identity`.
        control: see :func:`~torchrl_grpo.rewards.judge.own_model.control_pattern`.

    Raises:
        ConfigError: it does not start.
    """

    def __init__(self, where: str, model: str, gpu: int | None, engine_args: Mapping[str, Any]) -> None:
        parent = socket_parent(_SOCKET_ROOM)
        # Those of runs that were killed.
        remove_abandoned(parent, _PREFIX)
        self._folder = Folder(parent, _PREFIX)
        self.key = secrets.token_urlsafe(32)
        path = str(self._folder.path / "socket")
        self.address = f"unix:{path}"
        self._supervised = SupervisedProcess(_PROGRAM, gpu=gpu)
        self._group: int | None = None
        settings = {
            **{"model": model, "on_cpu": gpu is None, "engine_args": dict(engine_args)},
            **{"socket": path, "key": self.key},
        }
        try:
            self._start(settings, where)
            # Only now is a model of the hub there.
            self.identity = own_model.identity(model, engine_args)
            self.control = own_model.control_pattern(model, engine_args)
        except BaseException:
            self.close()
            raise

    def _start(self, settings: Mapping[str, Any], where: str) -> None:
        self._supervised.socket.settimeout(_START_LIMIT_S)
        why = "ended while it started"
        try:
            self._supervised.socket.sendall(json.dumps(settings).encode() + b"\n")
            with self._supervised.socket.makefile("r", encoding="utf-8") as lines:
                if line := lines.readline():
                    self._group = json.loads(line)["group"]
                if lines.readline():
                    return
        except TimeoutError:
            why = f"was not ready within {_START_LIMIT_S:g} s"
        except OSError:
            # It ended before it was told what to start.
            pass
        raise ConfigError(
            f"{where}: the judge's server {why}, and its messages are in the log; correct model or "
            "engine_args beside it, or start a server by hand and name its url"
        )

    def close(self) -> None:
        """End the server and everything that it has started. It may be called twice."""
        segments = set() if self._group is None else segments_of(self._group)
        self._supervised.end()
        self._supervised.socket.close()
        unlink(segments)
        self._folder.close()
