"""The environment's side of one episode: it answers each message of the model."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchrl_grpo.config.remote import is_url, place
from torchrl_grpo.data.episode import EpisodeRecord
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.processes import CallError, EpisodeHost, EpisodeProcess
from torchrl_grpo.envs.episodes.shell_task import ShellTask
from torchrl_grpo.envs.episodes.tools import shell_tool
from torchrl_grpo.envs.episodes.tools.call_formats import ToolCall
from torchrl_grpo.envs.episodes.tools.call_turns import CallTurn
from torchrl_grpo.envs.episodes.tools.python_tool import CodeFailed
from torchrl_grpo.envs.episodes.tools.registry import check_arguments
from torchrl_grpo.envs.episodes.tools.tool import StartedTool, Tool
from torchrl_grpo.envs.episodes.tools.tool_calls import CallReader
from torchrl_grpo.envs.episodes.types import (
    Environment,
    EpisodeError,
    Step,
    cut,
    encodable,
    messages_from,
    step_from,
)
from torchrl_grpo.errors import TrainingStopped

# Time that a server of tools has to start if a command starts it, in seconds.
CONNECT_LIMIT_S = 60.0
# More calls in one message are refused: a model that repeats itself writes hundreds.
_MOST_CALLS = 16
# An OSError comes from a machine that has no process left for the python tool.
_CALL_ERRORS = (
    CallError, CodeFailed, OSError, ValueError, ZeroDivisionError, RecursionError, MemoryError
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunnerOptions:
    """What the episodes of a run have in common.

    Attributes:
        tools: tools by name.
        make_environment: function that makes a built-in environment; None for none.
        in_own_process: whether the environment is the user's and runs in a process of the episode's own.
        host: process that forks those of the episodes; None if nothing of the user runs.
        form: how actions of an OpenEnv environment are made; None for other environments.
        timeout_s: time limit of a call of a tool or of an environment.
        max_characters: longest result of a tool.
        reader: reads the calls in messages of the model.
        call_turn: how the chat template renders messages with calls; None if calls are ordinary text.
        max_turns: largest number of messages of the model in an episode.
    """

    tools: Mapping[str, Tool]
    make_environment: Callable[[], Environment] | None
    in_own_process: bool
    host: EpisodeHost | None
    timeout_s: float
    max_characters: int
    reader: CallReader = dataclasses.field(default_factory=CallReader)
    call_turn: CallTurn | None = None
    form: Mapping[str, Any] | None = None
    max_turns: int = 8

    @property
    def is_quick(self) -> bool:
        """Whether every answer takes a moment at most, and need not run in another thread."""
        return not self.in_own_process and all(tool.is_quick for tool in self.tools.values())


class EpisodeRunner:
    """Runs the environment and the tools of one episode. One thread uses it at a time.

    Args:
        options: what the episodes have in common.
        example: problem of the episode.
    """

    def __init__(self, options: RunnerOptions, example: Example) -> None:
        self._options = options
        self._example = example
        self._environment: Environment | None = None
        # Apart, so that a tool that hangs does not take the environment's state with it.
        self._environment_process: EpisodeProcess | None = None
        self._tool_process: EpisodeProcess | None = None
        # Built-in tools that have a state.
        self._started_tools: dict[str, StartedTool] = {}
        self._processes: list[EpisodeProcess] = []
        self._started = False
        self._closed = False
        # Another thread may end an episode that is about to start a process.
        self._lock = threading.Lock()
        self.record = EpisodeRecord()

    def step(self, message: str) -> Step:
        """Answer a message of the model, and keep the record of the episode.

        Args:
            message: its text, as rewards read it.

        Returns:
            The messages that follow, and whether the episode ends. An environment that fails ends it, and the
            record has the error.
        """
        self.record.turns += 1
        self.record.add_message_of_model(message)
        try:
            step = self._answer(message)
        except EpisodeError as error:
            self.record.error = str(error)
            step = Step(done=True)
        self.record.reward += step.reward
        self.record.messages += step.messages
        return step

    def close(self) -> None:
        """End the processes of the episode. It may be called twice."""
        with self._lock:
            self._closed = True
            parts: list[EpisodeProcess | StartedTool] = [*self._processes, *self._started_tools.values()]
        for part in parts:
            part.close()

    def _answer(self, message: str) -> Step:
        calls = self._options.reader.read(message) if self._options.tools else []
        if not self._started and (self._options.in_own_process or self._options.make_environment):
            # Also before a tool: an environment may count on its reset.
            self._reset()
        if calls:
            self.record.tool_calls += len(calls)
            step = self._call_all(calls)
            if isinstance(self._environment, ShellTask) and self.record.turns >= self._options.max_turns:
                # The folder is graded as it is after the last turn.
                with _as_episode_errors("step"):
                    step.reward += self._environment.step(message).reward
            return step
        if self._options.in_own_process:
            messages, reward, done = self._ask({"do": "step", "message": message}, "step")
            return Step(messages, reward, done)
        if self._environment is None:
            return Step(done=True)
        with _as_episode_errors("step"):
            return step_from(self._environment.step(message))

    def _call_all(self, calls: Sequence[ToolCall]) -> Step:
        step = Step()
        for number, call in enumerate(calls):
            result = self._call(call, number)
            step = Step([*step.messages, *result.messages], step.reward + result.reward, result.done)
            if step.done:
                break
        if self._options.call_turn is not None and self._options.call_turn.takes_one:
            content = "\n".join(str(result["content"]) for result in step.messages)
            step.messages = [{**step.messages[0], "content": content}]
        return step

    def _reset(self) -> None:
        self._started = True
        example = self._example
        if example.source_messages:
            example = dataclasses.replace(example, messages=example.source_messages, source_messages=[])
        if self._options.in_own_process:
            payload = {"do": "reset", "example": example.plain(), "form": self._options.form}
            messages = self._ask(payload, "reset")
        else:
            assert self._options.make_environment is not None
            with _as_episode_errors("reset"):
                self._environment = self._options.make_environment()
                if isinstance(self._environment, ShellTask):
                    self._keep_started(shell_tool.NAME, self._environment.folder)
                messages = messages_from(self._environment.reset(example), "what reset returned")
        # The description of the tools may have changed earlier messages.
        if messages and messages[-1] != self._example.messages[-1]:
            raise EpisodeError(
                f"env.environment: reset returned other messages for {self._example.id} than before; all "
                "responses to a problem share its prompt, so make it depend on the example only, for example "
                "with random.Random(example.id)"
            )

    def _ask(self, payload: dict[str, Any], what: str) -> Any:
        with _as_episode_errors(what):
            if self._environment_process is None:
                self._environment_process = self._start_process()
            return self._environment_process.call(payload, self._options.timeout_s)

    def _call(self, call: ToolCall, number: int) -> Step:
        failed, limit = call.error, self._options.max_characters
        step = Step()
        content = ""
        if self._closed:
            failed = "the episode has ended"
        if number >= _MOST_CALLS:
            failed = f"a message may have at most {_MOST_CALLS} calls"
        if failed is None:
            try:
                content, step = self._run(call)
            except TrainingStopped:
                # It is a ValueError too, but no mistake of the model.
                raise
            except _CALL_ERRORS as error:
                failed = str(error) or type(error).__name__
        if failed is not None:
            self.record.tool_errors += 1
            content = f"error: {failed}"
        # Some chat templates write the name, and only that of a tool is not the model's own text.
        name = call.name if call.name in self._options.tools else ""
        message = {"role": "tool", "name": name, "content": encodable(cut(content, limit))}
        if self._options.call_turn is not None:
            # Templates that write the call need a name.
            message["name"] = name or "unknown"
            known = dataclasses.replace(call, name=message["name"])
            message["tool_call_id"] = self._options.call_turn.message.id_of(known, number)
        return Step([message], step.reward, step.done)

    def _run(self, call: ToolCall) -> tuple[str, Step]:
        """Return the result of a call, and the reward and the end that a step of the environment gives."""
        tool = self._options.tools.get(call.name)
        if tool is None:
            raise CallError(f"there is no tool {call.name!r}; the tools are {', '.join(self._options.tools)}")
        wrong = check_arguments(tool.schema, call.arguments)
        if wrong is not None:
            raise CallError(wrong)
        if tool.run is not None:
            return tool.run(call.arguments, self._options.timeout_s), Step()
        payload = {"do": "tool", "tool": tool.spec, "name": tool.name, "arguments": call.arguments}
        if tool.start is not None:
            return self._with_state(tool).run(call.arguments, self._options.timeout_s), Step()
        if tool.of_environment:
            payload = {"do": "act", "tool": tool.name, "arguments": call.arguments}
            content, reward, done, failed = self._ask(payload, "step")
            if failed:
                raise CallError(content)
            return content, Step(reward=reward, done=done)
        if self._tool_process is None or self._tool_process.ended:
            self._tool_process = self._start_process()
        if tool.is_remote:
            # A server that is started for this episode may take longer than a call.
            limit_s = self._options.timeout_s if is_url(place(tool.spec)) else CONNECT_LIMIT_S
            self._tool_process.call({"do": "connect", "tool": tool.spec}, limit_s)
        return str(self._tool_process.call(payload, self._options.timeout_s)), Step()

    def _with_state(self, tool: Tool) -> StartedTool:
        """Return a built-in tool that has a state, which begins with its first call."""
        if tool.name not in self._started_tools:
            assert tool.start is not None
            self._keep_started(tool.name, tool.start())
        return self._started_tools[tool.name]

    def _keep_started(self, name: str, tool: StartedTool) -> None:
        with self._lock:
            if self._closed:
                raise CallError("the episode has ended")
            self._started_tools[name] = tool

    def _start_process(self) -> EpisodeProcess:
        assert self._options.host is not None
        process = self._options.host.start_episode()
        with self._lock:
            self._processes.append(process)
            closed = self._closed
        if closed:
            process.close()
        return process


@contextlib.contextmanager
def _as_episode_errors(what: str) -> Iterator[None]:
    """Turn any error of an environment into one of the episode."""
    try:
        yield
    except TrainingStopped:
        raise
    except CallError as error:
        raise EpisodeError(f"env.environment: {what} failed: {error}") from error
    except Exception as error:
        raise EpisodeError(f"env.environment: {what} failed: {type(error).__name__}: {error}") from error
