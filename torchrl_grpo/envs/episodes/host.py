"""Program of the process that imports the user's environments and tools, and forks processes for episodes.

    python -m torchrl_grpo.envs.episodes.host SOCKET

This process imports the user's code once. For an episode's environment, and for its tools, it forks a child,
which is ready in about a millisecond and shares the imported code. An episode that hangs, or that is killed,
affects no other. This process has one thread and no GPU, so it may fork.

``SOCKET`` is the number of a socket. The first line on it describes the user's code, and is answered. Then
the parent sends commands, which are not answered, so it never waits for this process. Each is a letter and
the number of an episode in a line. ``E`` starts an episode, and comes with its socket. If there is no room
for a process, that socket is closed. ``K`` ends an episode, with all that it started.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import selectors
import signal
import socket
import sys
import zlib
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config.remote import is_remote
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes import torchrl_env
from torchrl_grpo.envs.episodes.types import cut, messages_from, step_from
from torchrl_grpo.runtime import user_code
from torchrl_grpo.runtime.json_channel import attempt, line
from torchrl_grpo.runtime.supervised import adopt_orphans, die_with_parent, own_children

if TYPE_CHECKING:
    from torchrl_grpo.envs.episodes.openenv.client import OpenEnvClient
    from torchrl_grpo.envs.episodes.openenv.server import StartedServer


class Host:
    """Forks a child per episode and ends what is left of them.

    Args:
        control: socket to the parent.
        code: the user's code.
    """

    def __init__(self, control: socket.socket, code: UserCode) -> None:
        self._control, self._code = control, code
        self._server = code.server
        # Process id of each episode's child, by the episode's number.
        self._children: dict[int, int] = {}
        # What the user's module started when it was imported serves all episodes.
        self._kept = own_children()

    def serve(self) -> None:
        """Serve until the parent closes its socket. The supervisor then ends what is left."""
        # Processes that an episode leaves behind become children of this one, which ends them.
        adopt_orphans()
        wake, wakes = os.pipe()
        os.set_blocking(wakes, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, True)
            selector.register(wake, selectors.EVENT_READ, False)
            # What has ended before the signal had its handler.
            self._reap()
            while True:
                for key, _ in selector.select(None if self._server is None else self._server.pause_s()):
                    if not key.data:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake, 4_096)
                        self._reap()
                    elif not self._command([selector, wake, wakes]):
                        return
                if self._server is not None:
                    self._server.start_if_ended()

    def _command(self, private: list[Any]) -> bool:
        command, files, _, _ = socket.recv_fds(self._control, 1, 1)
        if not command:
            return False
        episode = int(_line(self._control))
        if command == b"E":
            # If there is no room for a process, the parent sees that the socket is closed.
            child = _fork()
            if child == 0:
                _become_episode(socket.socket(fileno=files[0]), self._control, private, self._code)
            os.close(files[0])
            if child is not None:
                self._children[episode] = child
        elif command == b"K":
            self._end(episode)
        return True

    def _end(self, episode: int) -> None:
        if (child := self._children.get(episode)) is not None:
            # Before it is reaped, after which the number may be another's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while child := os.waitpid(-1, os.WNOHANG)[0]:
                self._children = {name: number for name, number in self._children.items() if number != child}
                if self._server is not None and self._server.process == child:
                    self._server.has_ended = True
        servers = set() if self._server is None else {self._server.process}
        for orphan in own_children() - set(self._children.values()) - self._kept - servers:
            # A process that an episode moved out of its process group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(orphan, signal.SIGKILL)


def _fork() -> int | None:
    try:
        return os.fork()
    except OSError:
        return None


def _line(control: socket.socket) -> bytes:
    content = b""
    while not content.endswith(b"\n"):
        byte = control.recv(1)
        if not byte:
            raise EOFError
        content += byte
    return content


def _become_episode(own: socket.socket, control: socket.socket, private: list[Any], code: UserCode) -> None:
    status = 1
    try:
        os.setsid()
        die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        selector, *pipes = private
        selector.close()
        for pipe in pipes:
            os.close(pipe)
        own.set_inheritable(False)
        code.serve(own)
        status = 0
    finally:
        # Without the clean-up of the process that was copied.
        os._exit(status)


class UserCode:
    """The user's environment and tools.

    Args:
        spec: ``environment`` (a name as in ``env.environment``, or None), ``environment_args`` and ``tools``,
            names as in ``env.tools``; ``limit_s`` of a call; ``max_characters`` of the result of a tool;
            ``has_tools``, whether there are tools of any kind.

    Attributes:
        server: the environment's server, if a command starts it; None if there is none.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        name = spec["environment"]
        self._open_env: OpenEnvClient | None = None
        self.server: StartedServer | None = None
        self._environment: Any = None
        if name is not None and is_remote(name):
            # Imported here, because it is an extra.
            from torchrl_grpo.envs.episodes.openenv.client import OpenEnvClient

            limits = (spec["limit_s"], spec["max_characters"])
            self._open_env = OpenEnvClient(name, spec["environment_args"], *limits)
            self.server = self._open_env.server
        elif name is not None:
            self._environment = user_code.load(name, "env.environment")
        self._tools = {name: _load_tool(name) for name in spec["tools"]}
        self._episode: Any = None
        self._started_tools: dict[str, Any] = {}

    def serve(self, own: socket.socket) -> None:
        """Answer requests of the parent until it closes the socket."""
        with own, own.makefile("r", encoding="utf-8") as requests:
            for text in requests:
                request = json.loads(text)
                reply = attempt(lambda: self._run(request["payload"]))  # noqa: B023
                own.sendall(line(request["id"], reply))

    def _run(self, payload: dict[str, Any]) -> Any:
        kind = payload["do"]
        if kind == "describe":
            return self._describe(payload["limit_s"], payload["count"])
        if kind == "reset":
            example = Example(**payload["example"])
            if self._open_env is None:
                self._episode = self._create_environment(example)
            else:
                if self._episode is not None:
                    self._episode.close()
                self._episode = self._open_env.episode(payload["form"])
            returned = self._call_environment("reset", example)
            return messages_from(returned, "what reset returned")
        if kind == "step":
            step = step_from(self._call_environment("step", payload["message"]))
            return [step.messages, step.reward, step.done]
        if kind == "act":
            step, failed = self._call_environment("call_tool", payload["tool"], payload["arguments"])
            return [
                "\n".join(message["content"] for message in step.messages),
                step.reward,
                step.done,
                failed,
            ]
        if kind == "connect":
            return user_code.call(self._tool(payload["tool"]).connect)
        if is_remote(payload["tool"]):
            server = self._tool(payload["tool"])
            text, failed = user_code.call(server.call, payload["name"], payload["arguments"])
            if failed:
                raise user_code.UserCodeError(cut(text, self._spec["max_characters"]))
            return cut(text, self._spec["max_characters"])
        result = user_code.call(self._tool(payload["tool"]), **payload["arguments"])
        text = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        # Here, so that a long result does not travel.
        return cut(text, self._spec["max_characters"])

    def _describe(self, limit_s: float, count: int) -> dict[str, Any]:
        """Return what the servers offer: of the environment, and of each server of tools by its name."""
        environment = None
        if self._open_env is not None:
            environment = _call_client(self._open_env.describe, limit_s, count)
        servers = {
            name: make(name, shows_errors=True) for name, make in self._tools.items() if is_remote(name)
        }
        tools = {name: user_code.call(server.tools) for name, server in servers.items()}
        return {"environment": environment, "tools": tools}

    def _call_environment(self, method: str, *arguments: Any) -> Any:
        call = user_code.call if self._open_env is None else _call_client
        return call(getattr(self._episode, method), *arguments)

    def _create_environment(self, example: Example) -> Any:
        make, arguments = self._environment, dict(self._spec["environment_args"])
        assert make is not None
        # The classes of TorchRL have a metaclass that hides their parameters.
        takes = inspect.signature(make.__init__ if inspect.isclass(make) else make).parameters
        if "seed" in takes and "seed" not in arguments:
            # All responses to a problem must get the same prompt.
            arguments["seed"] = zlib.crc32(example.id.encode())
        made = user_code.call(make, **arguments)
        if torchrl_env.is_torchrl(made) and self._spec["has_tools"]:
            raise ValueError("an environment of TorchRL has tools of its own; remove env.tools")
        return torchrl_env.TorchRLEpisode(made) if torchrl_env.is_torchrl(made) else made

    def _tool(self, name: str) -> Any:
        tool = self._tools[name]
        if not inspect.isclass(tool):
            return tool
        # A tool that is a class has a state of its own in each episode.
        if name not in self._started_tools:
            made = self._tools[name](name) if is_remote(name) else user_code.call(tool)
            self._started_tools[name] = made
        return self._started_tools[name]


def _call_client(function: Any, *arguments: Any) -> Any:
    """Call the client of a server. Its errors need no line of code.

    Raises:
        UserCodeError: it raised.
    """
    try:
        return function(*arguments)
    except Exception as error:
        raise user_code.UserCodeError(str(error) or type(error).__name__) from error


def _load_tool(name: str) -> Any:
    """Load a function or a class of the user, or the class of a server of tools."""
    if not is_remote(name):
        return user_code.load(name, "env.tools")
    # Imported here, because it is an extra.
    from torchrl_grpo.envs.episodes.tools.mcp_server import McpServer

    return McpServer


def main(number: int) -> None:
    """Run the host on the socket of that number."""
    control = socket.socket(fileno=number)
    request = json.loads(_line(control))
    loaded: list[UserCode] = []
    reply = attempt(lambda: loaded.append(UserCode(request["payload"])))
    control.sendall(line(request["id"], reply))
    if loaded:
        Host(control, loaded[0]).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
