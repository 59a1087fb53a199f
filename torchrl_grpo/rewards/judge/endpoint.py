"""Requests to an OpenAI-compatible endpoint, of which nothing is expected: it may be slow, wrong or gone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import aiohttp

from torchrl_grpo.config.judges import JudgeConfig
from torchrl_grpo.rewards.judge.question import BadVerdict
from torchrl_grpo.runtime.http_body import BodyTooLong, read_body
from torchrl_grpo.runtime.printable import printable
from torchrl_grpo.runtime.shared_loop import LoopClosed, SharedLoop

_T = TypeVar("_T")
_ROUTE = "/chat/completions"
# Statuses of 4xx that a later attempt may not get: a timeout, a conflict, too early, and too many requests.
_PASSING = frozenset({408, 409, 425, 429})
# Bytes of the longest answer that is read, and characters of the longest verdict.
_MOST_BYTES, MOST_CHARACTERS = 2**20, 16_000
# Characters of the shortest key that is a secret. A shorter one stands in where a key is not needed, and any
# answer may have it.
_SHORTEST_SECRET = 8
# Seconds of the longest wait between two attempts, of what the endpoint asks for, and before a closed
# connection: servers close an unused one after 5 s, and a request that is sent at that moment is lost.
_LONGEST_WAIT_S, _LONGEST_RETRY_AFTER_S, _IDLE_S = 30.0, 60.0, 2.0


class JudgeError(Exception):
    """A judge gave no verdict."""


class _Failure(Exception):
    """An attempt that failed.

    Args:
        message: what went wrong.
        passes: whether another attempt may succeed.
        wait_s: seconds that the endpoint asks to wait.
        is_silent: whether nobody answered.
    """

    def __init__(
        self, message: str, passes: bool = True, wait_s: float | None = None, is_silent: bool = False
    ) -> None:
        super().__init__(message)
        self.passes, self.wait_s, self.is_silent = passes, wait_s, is_silent


class Endpoint:
    """A connection to the endpoint of a judge.

    Args:
        args: arguments of the judge.
        key: the endpoint's key; None if it has none.
        address: ``unix:PATH`` of a server that the run has started; None for the address in the arguments.
    """

    def __init__(self, args: JudgeConfig, key: str | None, address: str | None = None) -> None:
        self._args, self._key = args, key
        self._socket = None if address is None else address.removeprefix("unix:")
        url = "http://judge/v1" if address is not None else args.url.rstrip("/")
        self._url = url if url.endswith(_ROUTE) else url + _ROUTE
        # Whether nobody answered any attempt of a request. Others then make one attempt each, so that a round
        # does not wait for all attempts of all its responses.
        self._is_gone = False
        self._loop = SharedLoop("judges")
        self._session, self._places = self._loop.submit(self._open()).result()

    async def _open(self) -> tuple[aiohttp.ClientSession, asyncio.Semaphore]:
        # Compressed bytes could be few and their content endless.
        headers = {"Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        limits: dict[str, Any] = {"limit": self._args.concurrency, "keepalive_timeout": _IDLE_S}
        connector: aiohttp.BaseConnector = (
            aiohttp.TCPConnector(**limits)
            if self._socket is None
            else aiohttp.UnixConnector(self._socket, **limits)
        )
        session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=self._args.timeout_s),
        )
        return session, asyncio.Semaphore(self._args.concurrency)

    def ask(self, body: Mapping[str, Any], read: Callable[[str], _T]) -> Future[tuple[str, _T]]:
        """Send a request as often as needed, and return the future of the answer's text and its verdict.

        The future has a :class:`JudgeError` if no attempt succeeds.

        Args:
            body: JSON of the request.
            read: function that reads the verdict, or raises a
                :class:`~torchrl_grpo.rewards.judge.question.BadVerdict`.

        Raises:
            JudgeError: the connection is closed.
        """
        try:
            return self._loop.submit(self._ask(body, read))
        except LoopClosed as error:
            raise JudgeError("the connection to the judge is closed") from error

    async def _ask(self, body: Mapping[str, Any], read: Callable[[str], _T]) -> tuple[str, _T]:
        # Whoever waits before another attempt keeps its place, so that an endpoint under load gets less.
        async with self._places:
            for attempt in range(self._args.retries + 1):
                try:
                    text = await self._once(body)
                    self._is_gone = False
                    return text, read(text)
                except BadVerdict as error:
                    failure = _Failure(f"the judge's answer is no verdict: {error}")
                except BodyTooLong as error:
                    failure = _Failure(f"the judge's answer is {error}")
                except _Failure as error:
                    failure = error
                self._is_gone &= failure.is_silent
                if not failure.passes or self._is_gone or attempt == self._args.retries:
                    break
                await asyncio.sleep(self._wait_s(attempt, failure.wait_s))
            self._is_gone = failure.is_silent
            attempts = "1 attempt" if attempt == 0 else f"{attempt + 1} attempts"
            raise JudgeError(f"{self._clean(str(failure))} ({attempts})")

    def _wait_s(self, attempt: int, asked_s: float | None) -> float:
        if asked_s is not None:
            return asked_s
        # Requests that failed together must not all come back together. Nothing else depends on this.
        return min(_LONGEST_WAIT_S, self._args.backoff_s * 2.0**attempt) * random.uniform(0.5, 1.0)

    async def _once(self, body: Mapping[str, Any]) -> str:
        try:
            # Prompts and the key would go to wherever a redirect names.
            async with self._session.post(self._url, json=body, allow_redirects=False) as answer:
                content = await read_body(answer, _MOST_BYTES)
                if self._key is not None and len(self._key) >= _SHORTEST_SECRET:
                    # An endpoint may repeat it, and answers are kept.
                    content = content.replace(self._key.encode(), b"[key]")
                if answer.status != 200:
                    passes = answer.status >= 500 or answer.status in _PASSING
                    text = content[:500].decode(errors="replace").strip()
                    raise _Failure(
                        f"the judge answered {answer.status}: {text}", passes, _retry_after(answer)
                    )
        except TimeoutError as error:
            raise _Failure(
                f"the judge did not answer within {self._args.timeout_s:g} s", is_silent=True
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            message = f"the judge cannot be reached: {type(error).__name__} {error}"
            raise _Failure(message, is_silent=True) from error
        return _content(content)

    def _clean(self, message: str) -> str:
        """Return a message without the key, which an endpoint may repeat."""
        message = message.replace(self._key, "[key]") if self._key else message
        return printable(message)

    def close(self) -> None:
        """Close the connection; whoever waits for a verdict gets an exception.

        Any thread may call it but that of the connections.
        """
        self._loop.close(self._shut())

    async def _shut(self) -> None:
        await self._session.close()


def result(future: Future[_T]) -> _T:
    """Wait for a future of :meth:`Endpoint.ask`.

    Raises:
        JudgeError: there is no verdict, or the connection was closed.
    """
    try:
        return future.result()
    except CancelledError as error:
        raise JudgeError("the connection to the judge was closed") from error


def _retry_after(answer: aiohttp.ClientResponse) -> float | None:
    """Return the seconds that an answer asks to wait, within limits; None if it does not say so."""
    text = answer.headers.get("Retry-After", "")
    return min(float(text), _LONGEST_RETRY_AFTER_S) if text.isascii() and text.isdigit() else None


def _content(answer: bytes) -> str:
    """Return what the judge wrote.

    Raises:
        _Failure: the answer has another form, or is too long.
    """
    try:
        text = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise _Failure(f"the judge's answer is no chat completion: {answer[:200]!r}") from error
    if not isinstance(text, str):
        raise _Failure("the judge's answer has no text; a model that reasons may need a larger max_tokens")
    if len(text) > MOST_CHARACTERS:
        raise _Failure(f"the judge's answer is longer than {MOST_CHARACTERS:,} characters")
    return text
