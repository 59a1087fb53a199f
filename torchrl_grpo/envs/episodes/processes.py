"""Run the user's environments and tools in processes of their own: for each episode one of either kind."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

from torchrl_grpo.errors import ConfigError, TrainingStopped
from torchrl_grpo.rewards.sandbox.pool import START_LIMIT_S
from torchrl_grpo.runtime.json_channel import ChannelClosed, ChannelTimeout, JsonChannel, RemoteError

# -P keeps the working directory out of the module search path, unless it is on the parent's.
_COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "torchrl_grpo.envs.episodes.host")


class CallError(Exception):
    """A call of the user's code failed. The message is for the model, or for the log."""


class CallTimeout(CallError):
    """The call took too long, and its process was ended."""


@dataclass(frozen=True)
class UserCodeSpec:
    """The user's code that a host loads.

    Attributes:
        environment: name as in ``env.environment``; None for none.
        environment_args: arguments of the environment.
        tools: names as in ``env.tools``.
        max_characters: longest result of a tool, in characters.
        has_tools: whether the model has tools, built-in ones included.
    """

    environment: str | None = None
    environment_args: dict[str, Any] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    max_characters: int = 2_000
    has_tools: bool = False


class EpisodeHost:
    """The process that forks a child for each episode: see :mod:`torchrl_grpo.envs.episodes.host`.

    Args:
        spec: code that it loads.

    Raises:
        ConfigError: the code cannot be loaded there.
    """

    def __init__(self, spec: UserCodeSpec) -> None:
        ours, theirs = socket.socketpair()
        # The child must be able to import everything that this process can.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # only the parent handles Ctrl-C
            )
        self._control = ours
        self._lock = threading.Lock()
        self._closed = False
        ours.settimeout(START_LIMIT_S)
        try:
            ours.sendall(json.dumps(asdict(spec)).encode() + b"\n")
            reply = json.loads(self._line())
        except (OSError, EOFError) as error:
            self.close()
            raise ConfigError(
                f"env.environment, env.tools: their process does not start ({error!r})"
            ) from error
        if "error" in reply:
            self.close()
            raise ConfigError(reply["error"].partition(": ")[2])

    def start_episode(self) -> EpisodeProcess:
        """Fork the process of an episode.

        Raises:
            CallError: the machine has no room for another process.
            TrainingStopped: the host has ended. Without it every episode would fail in silence.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise CallError(f"no process can be started: {error}") from error
        with theirs:
            try:
                with self._lock:
                    socket.send_fds(self._control, [b"E"], [theirs.fileno()])
                    number = int(self._line())
            except (OSError, EOFError, ValueError) as error:
                ours.close()
                raise TrainingStopped(
                    "the process that runs the environment and the tools has ended, perhaps for lack of "
                    "memory; free some and resume with resume=auto"
                ) from error
        if number == 0:
            ours.close()
            raise CallError("no process can be started")
        return EpisodeProcess(self, ours, number)

    def kill(self, number: int) -> None:
        """End the process with this number and all that it started. It may have ended already."""
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(f"K{number}\n".encode())

    def close(self) -> None:
        """End the host and every episode. It may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._control.close()
        try:
            # It ends its children when its socket is closed.
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            byte = self._control.recv(1)
            if not byte:
                raise EOFError
            line += byte
        return line.decode()


class EpisodeProcess:
    """The process of one episode. One thread uses it at a time.

    Args:
        host: host that forked it.
        own: socket to it.
        number: its process id.
    """

    def __init__(self, host: EpisodeHost, own: socket.socket, number: int) -> None:
        self._host, self._own, self._number = host, own, number
        self._channel = JsonChannel(own.fileno(), own.fileno())
        self._lock = threading.RLock()
        self.ended = False

    def call(self, payload: dict[str, Any], limit_s: float) -> Any:
        """Run the user's code and return its result.

        Args:
            payload: see :meth:`~torchrl_grpo.envs.episodes.host.UserCode.serve`.
            limit_s: time limit in seconds.

        Raises:
            CallTimeout: it took longer. The process has been ended.
            CallError: the code raised, or the process has ended.
        """
        try:
            with self._lock:
                if self.ended:
                    raise ChannelClosed
                return self._channel.ask(payload, limit_s)
        except RemoteError as error:
            # The name of this project's own exception class tells the model nothing.
            text = str(error)
            raise CallError(text.removeprefix("UserCodeError: ")) from error
        except ChannelTimeout as error:
            self.close()
            raise CallTimeout(f"there was no answer within {limit_s:g} s") from error
        except ChannelClosed as error:
            self.close()
            raise CallError("its process has ended") from error

    def close(self) -> None:
        """End the process. It may be called twice, and from any thread."""
        if not self.ended:
            self.ended = True
            self._host.kill(self._number)
            with contextlib.suppress(OSError):
                self._own.shutdown(socket.SHUT_RDWR)
            # A call of another thread ends now. Before that, the number of the socket must stay its own.
            with self._lock:
                self._own.close()
