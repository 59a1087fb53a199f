"""Run the user's environments and tools in processes of their own: one of each kind for each episode."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

from torchrl_grpo.errors import ConfigError, TrainingStopped
from torchrl_grpo.rewards.sandbox.pool import START_LIMIT_S
from torchrl_grpo.runtime.json_channel import ChannelClosed, ChannelTimeout, JsonChannel, RemoteError
from torchrl_grpo.runtime.supervised import SupervisedProcess


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
        limit_s: time limit of a call in seconds.
        max_characters: longest result of a tool, in characters.
        has_tools: whether the model has tools, built-in ones included.
    """

    environment: str | None = None
    environment_args: dict[str, Any] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    limit_s: float = 10.0
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
        self._supervised = SupervisedProcess("torchrl_grpo.envs.episodes.host")
        self._process = self._supervised.process
        self._control = self._supervised.socket
        # Commands are sent by several threads. A host that is stopped for a while takes none.
        self._lock = threading.Lock()
        self._unsent: list[bytes] = []
        self._numbers = itertools.count(1)
        self._closed = False
        try:
            JsonChannel(self._control.fileno()).ask(asdict(spec), START_LIMIT_S)
        except RemoteError as error:
            self.close()
            raise ConfigError(str(error).partition(": ")[2]) from error
        except (ChannelClosed, ChannelTimeout) as error:
            self.close()
            raise ConfigError(
                "env.environment, env.tools: their process does not start "
                f"({error or f'no answer within {START_LIMIT_S:g} s'}); correct their files"
            ) from error

    def start_episode(self) -> EpisodeProcess:
        """Fork the process of an episode. This does not wait for it.

        Raises:
            CallError: the machine has no room for another process.
            TrainingStopped: the host has ended. Without it every episode would fail in silence.
        """
        number = next(self._numbers)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise CallError(f"no process can be started: {error}") from error
        try:
            with theirs, self._lock:
                self._send_rest()
                socket.send_fds(self._control, [f"E{number}\n".encode()], [theirs.fileno()])
        except BlockingIOError as error:
            ours.close()
            raise CallError("no process can be started: their host does not answer") from error
        except OSError as error:
            ours.close()
            raise _ended() from error
        return EpisodeProcess(self, ours, number)

    def kill(self, number: int) -> None:
        """End the episode with this number and all that it started. It may have ended already."""
        with self._lock, contextlib.suppress(OSError):
            self._unsent.append(f"K{number}\n".encode())
            self._send_rest()

    def _send_rest(self) -> None:
        while self._unsent:
            self._control.sendall(self._unsent[0])
            del self._unsent[0]

    def check_alive(self) -> None:
        """Check that the host can start further episodes.

        Raises:
            TrainingStopped: it has ended, and not by :meth:`close`.
        """
        if not self._closed and self._process.poll() is not None:
            raise _ended()

    def close(self) -> None:
        """End the host, every episode, and all that they started. It may be called twice."""
        self._closed = True
        self._supervised.end()
        with self._lock:
            self._control.close()


def _ended() -> TrainingStopped:
    return TrainingStopped(
        "the process that runs the environment and the tools has ended, perhaps for lack of memory; free "
        "some and resume with resume=auto"
    )


class EpisodeProcess:
    """The process of one episode. One thread uses it at a time.

    Args:
        host: host that forked it.
        own: socket to it.
        number: its number, by which the host knows it.
    """

    def __init__(self, host: EpisodeHost, own: socket.socket, number: int) -> None:
        self._host, self._own, self._number = host, own, number
        self._channel = JsonChannel(own.fileno())
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
            TrainingStopped: the host has ended.
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
            self._host.check_alive()
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
