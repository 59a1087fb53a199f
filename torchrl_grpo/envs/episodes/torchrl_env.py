"""TorchRL's own language-model environments as environments of episodes.

``env.environment`` may name a class or a function that returns a TorchRL environment in history mode:
``torchrl.envs.llm:CountdownEnv``, or a ``ChatEnv`` with transforms of your own. One is created for every
episode, with a batch of one.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.types import Message, Step


def problems(split: str, size: int = 1_000) -> list[dict[str, str]]:
    """Make rows for an environment that draws its problems itself, for ``env.dataset``.

    Args:
        split: ``train`` or ``test``.
        size: number of problems of each split.
    """
    return [{"question": f"{split} problem {number}"} for number in range(size)]


def is_torchrl(value: object) -> bool:
    """Whether an object is a TorchRL environment. TorchRL is not imported for that."""
    module = sys.modules.get("torchrl.envs")
    return module is not None and isinstance(value, module.EnvBase)


class TorchRLEpisode:
    """One episode of a TorchRL environment.

    ``reset`` gives it the problem's messages as ``"query"``, and the columns of the data set. If it has a
    data loader, that comes first. ``step`` gives it the conversation so far as ``("history", "full")``. The
    episode ends when the environment is done, or adds no message.

    Args:
        env: environment in history mode with batch size ``[1]``.
    """

    def __init__(self, env: Any) -> None:
        if tuple(env.batch_size) != (1,):
            size = tuple(env.batch_size)
            raise ValueError(f"the environment has batch size {size}, and an episode has (1,)")
        self._env = env

    def reset(self, example: Example) -> list[Message]:
        """Start the episode, and return the messages of its prompt."""
        import torch
        from tensordict import NonTensorData, NonTensorStack, TensorDict

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(example.id.encode()))
            columns = {**example.columns, self._env.data_key: example.messages}
            entries = {name: NonTensorStack(NonTensorData(value)) for name, value in columns.items()}
            self._state = self._env.reset(TensorDict(entries, batch_size=[1]))
        self._messages = _messages(self._state["history"].prompt)
        return self._messages

    def step(self, message: str) -> Step:
        """Answer a message of the model."""
        from torchrl.data.llm import History
        from torchrl.modules.llm.policies import ChatHistory

        conversation = [*self._messages, {"role": "assistant", "content": message}]
        state = self._state.clone(recurse=False)
        prompt = self._state["history"].prompt
        state["history"] = ChatHistory(
            prompt=prompt,
            response=History.from_chats([conversation[-1:]]),
            full=History.from_chats([conversation]),
            batch_size=[1],
        )
        following = self._env.step(state)["next"]
        reward = following.get("reward", None)
        self._messages, self._state = _messages(following["history"].prompt), following
        added = self._messages[len(conversation) :]
        done = bool(following["done"].all()) or not added
        return Step(added, 0.0 if reward is None else float(reward.sum()), done)


def _messages(history: Any) -> list[Message]:
    """Turn a history with batch size ``[1, messages]`` into messages."""
    return [{"role": message.role, "content": message.content} for message in history[0].unbind(0)]
