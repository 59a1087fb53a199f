"""What kinds of servers differ in: routes, JSON, and how a method reaches the process with the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchrl_grpo.inference.protocol import Completion, Request
from torchrl_grpo.inference.servers.http import Call, ServerConnection


@dataclass(frozen=True)
class Sampled:
    """A response, and the weights that sampled it.

    Attributes:
        completion: the response.
        weights: names of the weights that sampled its tokens; empty if it has none.
    """

    completion: Completion
    weights: set[str]


@dataclass(frozen=True)
class Likeliest:
    """The likeliest next tokens after one prompt, the likeliest first.

    Attributes:
        token_ids: the tokens.
        log_probs: their log-probabilities at temperature 1.
        cached_tokens: number of tokens of the prompt that came from a prefix cache.
    """

    token_ids: list[int]
    log_probs: list[float]
    cached_tokens: int


class ServerApi(Protocol):
    """The routes of one kind of server.

    Attributes:
        sign_of_life: request that an engine answers while it is busy, if it runs at all.
    """

    sign_of_life: Call

    def generate(self, request: Request, end_token_ids: Sequence[int]) -> Call:
        """Return the call that samples a response.

        Args:
            request: the request.
            end_token_ids: tokens that end a response.
        """

    def sampled(self, request: Request, answer: Any) -> Sampled:
        """Read the answer to :meth:`generate`.

        Args:
            request: the request.
            answer: object of the type that the call names.

        Raises:
            ModelError: the server makes other tokens of a prompt with pictures than the model's processor.
        """

    def likeliest(self, request: Request, top_k: int) -> Call:
        """Return the call that asks for the ``top_k`` likeliest next tokens after a prompt."""

    def read_likeliest(self, answer: Any, top_k: int) -> Likeliest:
        """Read the answer to :meth:`likeliest`."""

    def abort_all(self, server: ServerConnection) -> None:
        """Abort every request. The server answers each with the tokens that it has."""

    def pause(self, server: ServerConnection) -> None:
        """Freeze the requests of other clients; those of this run are aborted before.

        The frozen requests go on with the weights that the server has at :meth:`resume`.
        """

    def resume(self, server: ServerConnection) -> None:
        """End the pause, if there is one."""

    def name_weights(self, server: ServerConnection, name: str) -> None:
        """Have the server name its weights in each answer."""

    def reset_cache(self, server: ServerConnection) -> None:
        """Drop all cached keys and values.

        Raises:
            RuntimeError: requests are still running.
        """

    def sleep(self, server: ServerConnection) -> None:
        """Free the memory of weights and caches; the weights are lost."""

    def wake(self, server: ServerConnection) -> None:
        """Allocate the memory again."""

    def call(
        self, server: ServerConnection, method: str, arguments: Mapping[str, Any], folder: Path
    ) -> list[Any]:
        """Call a method where the weights are, and return the result of each process that has some.

        Args:
            server: the connection.
            method: name of a method of
                :class:`~torchrl_grpo.inference.servers.vllm.extension.WeightExtension`.
            arguments: its arguments, as JSON has them.
            folder: folder through which weights travel.

        Raises:
            ServerLost: the method failed.
        """
