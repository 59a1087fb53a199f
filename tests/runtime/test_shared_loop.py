"""The event loop that all connections of a process share."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from torchrl_grpo.runtime.shared_loop import LoopClosed, SharedLoop

WAIT_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[SharedLoop, SharedLoop]]:
    pair = SharedLoop("test"), SharedLoop("test")
    yield pair
    for each in pair:
        each.close(nothing())


async def nothing() -> None:
    pass


async def thread() -> threading.Thread:
    return threading.current_thread()


def started(loop: SharedLoop) -> Future[None]:
    """Return work that never ends, once it has begun."""
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    future = loop.submit(work())
    assert begun.wait(WAIT_S)
    return future


def test_all_share_one_thread_that_ends_with_the_last(pair: tuple[SharedLoop, SharedLoop]) -> None:
    first, second = (loop.submit(thread()).result(WAIT_S) for loop in pair)
    assert first is second
    pair[0].close(nothing())
    assert first.is_alive()
    pair[1].close(nothing())
    assert not first.is_alive()
    later = SharedLoop("test")
    assert later.submit(thread()).result(WAIT_S) is not first
    later.close(nothing())


def test_other_kinds_of_connections_have_another_thread(pair: tuple[SharedLoop, SharedLoop]) -> None:
    other = SharedLoop("another test")
    assert other.submit(thread()).result(WAIT_S) is not pair[0].submit(thread()).result(WAIT_S)
    other.close(nothing())


def test_a_failure_of_the_last_work_leaves_no_thread(pair: tuple[SharedLoop, SharedLoop]) -> None:
    async def last() -> None:
        raise OSError("the last work")

    pair[0].close(nothing())
    running = pair[1].submit(thread()).result(WAIT_S)
    with pytest.raises(OSError, match="the last work"):
        pair[1].close(last())
    assert not running.is_alive()


def test_closing_one_cancels_its_own_work_alone(pair: tuple[SharedLoop, SharedLoop]) -> None:
    closed, kept = (started(loop) for loop in pair)
    ended: list[bool] = []

    async def last() -> None:
        ended.append(closed.done())

    pair[0].close(last())
    with pytest.raises(CancelledError):
        closed.result(WAIT_S)
    assert ended == [True], "what was given to close runs once, after the work has ended"
    assert not kept.done()
    with pytest.raises(LoopClosed):
        pair[0].submit(nothing())
    assert pair[1].submit(thread()).result(WAIT_S).is_alive()


def test_closing_twice_does_the_last_work_once(pair: tuple[SharedLoop, SharedLoop]) -> None:
    calls: list[int] = []

    async def last(number: int) -> None:
        calls.append(number)

    pair[0].close(last(1))
    pair[0].close(last(2))
    assert calls == [1]


def test_work_that_was_submitted_just_before_closing_is_canceled(pair: tuple[SharedLoop, SharedLoop]) -> None:
    futures = [pair[0].submit(asyncio.Event().wait()) for _ in range(100)]
    pair[0].close(nothing())
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(WAIT_S)


def test_a_forked_process_has_a_loop_that_runs(pair: tuple[SharedLoop, SharedLoop]) -> None:
    started(pair[0])
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()

    def answer() -> None:
        loop = SharedLoop("test")
        answers.put(loop.submit(thread()).result(WAIT_S).is_alive())
        loop.close(nothing())

    child = fork.Process(target=answer)
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == 0
    assert answers.get()
